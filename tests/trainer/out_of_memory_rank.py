"""One of two ranks that torchrun starts: rank 1 has no memory for packs above a limit."""

import sys
from pathlib import Path

import torch

from tests.trainer.model import small
from tests.trainer.test_out_of_memory import LONGEST, limit_memory
from trainer.algorithm.settings import LossSettings
from trainer.learner import Learner
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.model.sharding import join, leave
from trainer.pack_limit import PackLimit


def main() -> None:
    torch.set_num_threads(1)
    ranks = join()
    limit = PackLimit(Path(sys.argv[1]), ExecutionSettings(tokens_per_pack=64))
    learner = Learner(
        small.model(),
        LearnerSettings(),
        LossSettings(),
        limit.apply(ranks),
        device=torch.device("cpu"),
    )
    if ranks.rank == 1:
        limit_memory(learner, tokens=LONGEST)
    with limit.keep_for_next_start():
        learner.step(small.batch())
    leave()


if __name__ == "__main__":
    main()
