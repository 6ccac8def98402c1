"""One rank of two: `python -m tests.trainer.algorithm.rank RANK FILE` prints what both have seen."""

import json
import sys
from datetime import timedelta

from torch import distributed

from tests.trainer.algorithm.packs import tokens
from trainer.algorithm.objective import Tokens, objective
from trainer.algorithm.settings import LossSettings

PACKS = (
    tokens([-1.0, -2.0, -0.5], [-1.1, -1.8, -3.0], [1.0] * 3, samples=[0, 2, 2], trajectories=4),
    tokens([-1.0, -0.3], [-1.4, -0.2], [-1.0, 1.0], samples=[3, 2], ages=[6, 0], trajectories=4),
)


def metrics_of(pack: Tokens) -> dict[str, float]:
    return objective(LossSettings(), pack)[1].over_ranks().metrics()


if __name__ == "__main__":
    rank, file = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    sys.stdout.write(json.dumps(metrics_of(PACKS[rank])))
    distributed.destroy_process_group()
