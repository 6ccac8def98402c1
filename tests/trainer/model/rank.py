"""One of the processes of test_sharding: trains its share of batches, saves, restores and goes on."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from tests.trainer.model import small
from tests.trainer.saved import save
from trainer.algorithm.settings import LossSettings
from trainer.checkpoints.folder import Checkpoints
from trainer.checkpoints.saved_state import SavedState
from trainer.checkpoints.staging import StagedState
from trainer.data.batch import Batch
from trainer.learner import Learner
from trainer.learner_state import restore_state, state_tensors
from trainer.model import initial_weights
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.model.sharding import join
from trainer.model.weight_files import open_weights

STEPS = 3
LOSS = LossSettings(aggregation="prompt_mean")
SETTINGS = LearnerSettings(learning_rate=1e-3)
EXECUTION = ExecutionSettings(tokens_per_pack=64)


def learner_of(kind: str) -> Learner:
    causal = small.mamba() if kind == "Mamba" else small.model(kind)
    return Learner(causal, SETTINGS, LOSS, EXECUTION, device=torch.device("cpu"))


def batch_of(kind: str, seed: int) -> Batch:
    """Without its kernels a state space takes a moment for every id."""
    if kind == "Mamba":
        return small.batch(3, seed)
    return small.branched_batch(seed) if seed % 2 else small.batch(8, seed)


def train(kind: str) -> tuple[Learner, list[dict[str, float]]]:
    learner = learner_of(kind)
    batches = [batch_of(kind, seed) for seed in range(STEPS)]
    return learner, [learner.step(batch) for batch in batches]


def save_shards(folder: Path, run: str, learner: Learner) -> dict[str, int]:
    """A checkpoint, during which no tensor is gathered; the bytes of this rank's copy, and of all."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a whole tensor was gathered")

    with (
        patch.object(DTensor, "full_tensor", refuse),
        patch.object(DTensor, "redistribute", refuse),
    ):
        copies = StagedState().copy(state_tensors(learner)).values()
        own = [copy.to_local() if isinstance(copy, DTensor) else copy for copy in copies]
        save(Checkpoints(folder, run, keep=1), 1, learner)
    return {"own": sum(map(_bytes, own)), "whole": sum(map(_bytes, copies))}


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


class CountingReads(Mapping[str, Any]):
    """The tensors of a folder, counting the elements that are read of them."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._stored = stored
        self.read = 0

    def __getitem__(self, name: str) -> Any:
        return _CountedTensor(self, self._stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class _CountedTensor:
    def __init__(self, counting: CountingReads, stored: Any) -> None:
        self._counting, self._stored = counting, stored
        self.get_shape = stored.get_shape

    def __getitem__(self, part: Any) -> Any:
        tensor = self._stored[part]
        self._counting.read += tensor.numel()
        return tensor


def load_shards(model: Path) -> tuple[Learner, dict[str, int]]:
    """A learner from a Hugging Face folder, and the elements that this rank read of how many."""
    counts: dict[str, int] = {}

    @contextmanager
    def counting(folder: Path) -> Iterator[CountingReads]:
        with open_weights(folder) as stored:
            counted = CountingReads(stored)
            yield counted
            counts.update(own=counted.read, whole=sum(map(_elements, stored.values())))

    with patch.object(initial_weights, "open_weights", counting):
        return Learner.from_folder(model, SETTINGS, LOSS), counts


def _elements(stored: Any) -> int:
    return int(torch.Size(stored.get_shape()).numel())


def _note(folder: Path, name: str, rank: int, content: Any) -> None:
    (folder / f"{name}-{rank}.json").write_text(json.dumps(content))


def train_and_save(folder: Path, kinds: list[str]) -> None:
    """Each kind is trained, saved, sent, exported, restored and trained on."""
    ranks = join()
    for kind in kinds:
        learner, metrics = train(kind)
        _note(folder, f"{kind}-bytes", ranks.rank, save_shards(folder, kind, learner))
        sent = [dict(learner.weights(dtype)) for dtype in (torch.float32, torch.bfloat16)]
        if ranks.rank == 0:
            torch.save(sent, folder / f"{kind}-sent.pt")
            _note(folder, kind, 0, metrics)
        learner.export(folder, folder / f"{kind}-model", torch.float32)
        again = learner_of(kind)
        restore_state(again, SavedState(folder / kind / "00000001"))
        for name, made in (("kept", learner), ("restored", again)):
            made.step(batch_of(kind, 9))
            save_shards(folder, f"{kind}-{name}", made)


def restore_and_save(folder: Path, kinds: list[str]) -> None:
    """Each kind is restored from what another number of ranks has saved, and saved again; each model
    folder is loaded and saved."""
    ranks = join()
    for kind in kinds:
        learner = learner_of(kind)
        restore_state(learner, SavedState(folder / kind / "00000001"))
        save_shards(folder, f"{kind}-resharded", learner)
    for model in sorted((folder / "models").iterdir()):
        learner, counts = load_shards(model)
        _note(folder, f"{model.name}-elements", ranks.rank, counts)
        save_shards(folder, model.name, learner)
    save_shards(folder, "adapters", train_adapters(folder))


def train_adapters(folder: Path) -> Learner:
    torch.manual_seed(3)
    settings = SETTINGS.model_copy(update={"lora_rank": 4})
    learner = Learner.from_folder(folder / "models" / "tied", settings, LOSS, EXECUTION)
    learner.step(small.batch())
    return learner


def main() -> None:
    torch.set_num_threads(1)
    run = {"train": train_and_save, "restore": restore_and_save}[sys.argv[1]]
    run(Path(sys.argv[2]), sys.argv[3:])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
