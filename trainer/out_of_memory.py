"""What happens when a forward or backward pass does not fit into the memory of the device.

The failed pass has changed no weight. So the gradients are dropped, packs are made at most half as
large, and the present optimizer step begins again; earlier ones of the batch stay as they are. The
gradient does not depend on the size of packs. The smaller size holds until the process ends.

Two cases cannot be repeated in place, and end in NextStartNeeded, from which `pack_limit.py` takes the
size for the next start. Of several ranks, the others wait for the failed one inside of the pass, in a
collective operation that it will not join. And proximal log-probs belong to packs and to weights that
are gone once the first optimizer step of a batch is done.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from servicekit.errors import Fatal
from trainer.model.minibatches import MULTIPLE
from trainer.model.settings import ExecutionSettings

T = TypeVar("T")

PADDING = max(MULTIPLE.values())
"""Packs are padded by less than this many tokens."""


class PackTooLarge(Exception):
    """The device had no memory for a pass of this many tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"no memory for a pass of {tokens:,} tokens")
        self.tokens = tokens


class NextStartNeeded(Fatal):
    """The step can be repeated with smaller packs, but only by a new start."""

    def __init__(self, tokens: int, tokens_per_pack: int) -> None:
        super().__init__(
            f"out of memory in a pass of {tokens:,} tokens, which cannot be repeated in this process; "
            f"start again to continue with packs of at most {tokens_per_pack:,} tokens"
        )
        self.tokens_per_pack = tokens_per_pack


def run_pass(tokens: int, run: Callable[[], T]) -> T:
    """Runs a pass of that many tokens; raises PackTooLarge if there is no memory for it."""
    try:
        return run()
    except torch.OutOfMemoryError:
        pass
    # Outside of the handler, since the handled exception keeps the tensors of the pass alive.
    raise PackTooLarge(tokens)


def smaller_packs(execution: ExecutionSettings, tokens: int, version: int) -> ExecutionSettings:
    """Settings with packs of at most half the size, after a pass of that many tokens has failed. Only a
    row that cannot be split has a pass above `tokens_per_pack`, and for it there are none."""
    largest = min(execution.tokens_per_pack, tokens)
    if tokens >= execution.tokens_per_pack + PADDING or largest < 2:
        raise Fatal(
            f"version {version} cannot be trained: a row of {tokens:,} tokens does not fit into the "
            "memory of the device, even alone; set --gradient-checkpointing, use more or larger GPUs, "
            f"or start with --give-up {version} to continue without this batch, and limit the length "
            "of rollouts"
        )
    return execution.model_copy(update={"tokens_per_pack": largest // 2})


def release_memory(device: torch.device) -> None:
    """Returns memory that torch keeps for reuse: larger packs have left it in unfit pieces."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
