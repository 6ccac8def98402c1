"""A batch that was packed ahead of its step, in CPU memory.

Packing depends on settings that may change until the step, such as the size of packs after one did not
fit into memory. The packs are used only if they would be made the same way again.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from trainer.model.minibatches import BatchSplitter, Minibatch

if TYPE_CHECKING:
    from trainer.data.batch import Batch


@dataclass(frozen=True, slots=True)
class PackedBatch:
    batch: "Batch"
    splitter: BatchSplitter
    minibatches: list[Minibatch]

    def fits(self, batch: "Batch", splitter: BatchSplitter) -> bool:
        """Whether the splitter would pack the batch in the same way."""
        return batch is self.batch and splitter == self.splitter


def move(minibatch: Minibatch, device: Any) -> Minibatch:
    """The minibatch with its tensors on the device."""
    return replace(minibatch, packs=[_move(pack, device) for pack in minibatch.packs])


def _move(pack: Any, device: Any) -> Any:
    """A copy of a pack, and of packs in it, with all tensors on the device."""
    moved: dict[str, Any] = {}
    for field in fields(pack):
        value = getattr(pack, field.name)
        if isinstance(value, torch.Tensor):
            pinned = value.pin_memory() if device.type == "cuda" else value
            moved[field.name] = pinned.to(device, non_blocking=True)
        elif hasattr(value, "__dataclass_fields__"):
            moved[field.name] = _move(value, device)
    return replace(pack, **moved)
