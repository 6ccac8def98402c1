"""One of the processes of test_sharding: trains its share of each batch, and leaves what came out."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainer.model import small
from trainer.algorithm.settings import LossSettings
from trainer.data.batch import Batch
from trainer.learner import Learner
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.model.sharding import join

STEPS = 3
LOSS = LossSettings(aggregation="prompt_mean")


def learner_of(kind: str) -> Learner:
    settings, execution = LearnerSettings(learning_rate=1e-3), ExecutionSettings(tokens_per_pack=64)
    causal = small.mamba() if kind == "Mamba" else small.model(kind)
    return Learner(causal, settings, LOSS, execution, device=torch.device("cpu"))


def batch_of(kind: str, seed: int) -> Batch:
    """Without its kernels a state space takes a moment for every id."""
    if kind == "Mamba":
        return small.batch(3, seed)
    return small.branched_batch(seed) if seed % 2 else small.batch(8, seed)


def train(kind: str) -> tuple[Learner, list[dict[str, float]]]:
    learner = learner_of(kind)
    batches = [batch_of(kind, seed) for seed in range(STEPS)]
    return learner, [learner.step(batch) for batch in batches]


def _after(learner: Learner, batch: Batch) -> dict[str, Any]:
    learner.step(batch)
    return learner.state()


def main() -> None:
    torch.set_num_threads(1)
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    ranks = join()
    for kind in kinds:
        learner, metrics = train(kind)
        state = learner.state()
        sent = dict(learner.weights(torch.float32))
        if ranks.rank == 0:
            torch.save({"state": state, "sent": sent}, folder / f"{kind}.pt")
            (folder / f"{kind}.json").write_text(json.dumps(metrics))
        learner.export(folder, folder / f"{kind}-model", torch.float32)
        torch.distributed.barrier()
        again = learner_of(kind)
        again.load_state(torch.load(folder / f"{kind}.pt")["state"])
        states = [_after(made, batch_of(kind, 9)) for made in (learner, again)]
        if ranks.rank == 0:
            torch.save(states, folder / f"{kind}-after.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
