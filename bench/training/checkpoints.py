"""What a checkpoint costs: `python -m bench.training.checkpoints`.

A model of the shape of Qwen2.5-0.5B with random weights and AdamW's averages, on a GPU if there is one:
how long training stands still, how long the files take in the background, and how much memory of the
GPU it takes. `--tiny` runs it with a tiny model, on any machine. With torchrun every rank saves its
shards.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from bench.training.rows import batch_of, lengths
from bench.training.speed import GIB, model
from trainer.algorithm.settings import LossSettings
from trainer.checkpoints.folder import Checkpoints
from trainer.checkpoints.writer import CheckpointWriter
from trainer.learner import Learner
from trainer.learner_state import restore_state, state_tensors
from trainer.model.settings import LearnerSettings
from trainer.model.sharding import join, leave


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dir", type=Path, help="folder for the files (default: a temporary one)")
    options = parser.parse_args()
    ranks = join()
    with tempfile.TemporaryDirectory(dir=options.dir) as made:
        # All ranks use the folder of rank 0.
        folders = [made]
        if ranks.world > 1:
            dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        if ranks.rank == 0:
            model(options.tiny, "cpu").save_pretrained(folder / "model")
        if ranks.world > 1:
            dist.barrier()
        _measure(folder, options.tiny, f"rank {ranks.rank} of {ranks.world}")
        if ranks.world > 1:
            dist.barrier()
    leave()


def _measure(folder: Path, tiny: bool, rank: str) -> None:
    with _watching(rank, "load the model"):
        learner = Learner.from_folder(folder / "model", LearnerSettings(), LossSettings())
    sizes = lengths(16, 64 if tiny else 512, 256 if tiny else 2048)
    batch = batch_of(sizes, learner.model.causal.config.vocab_size)
    learner.step(batch)
    checkpoints = Checkpoints(folder, "bench", keep=2)
    writer = CheckpointWriter(checkpoints, learner.ranks, incarnation=1)
    for version in (1, 2):  # the first one allocates the memory for the copy
        with _watching(rank, f"checkpoint {version}, training waits"):
            writer.start(version, state_tensors(learner), {})
        with _watching(rank, f"checkpoint {version}, a step while it is written"):
            learner.step(batch)
        with _watching(rank, f"checkpoint {version}, until it is on disk"):
            writer.wait()
    if learner.ranks.world > 1:
        dist.barrier()  # rank 0 has renamed it
    with _watching(rank, "restore the checkpoint"):
        restore_state(learner, checkpoints.open(2))
    files = [file.stat().st_size for file in checkpoints.path(2).iterdir()]
    print(f"{rank}: {len(files)} files, {sum(files) / GIB:.2f} GiB", flush=True)


@contextmanager
def _watching(rank: str, name: str) -> Iterator[None]:
    """Prints the seconds that it took, and by how much the GPU's memory rose above what it was."""
    _synchronize()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    yield
    _synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(f"{rank}: {name:45} {seconds:7.3f} s  GPU +{(peak - before) / GIB:.3f} GiB", flush=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
