"""A closed group of agents as a ScoredGroup, as if an environment had posted it.

Every row of a trajectory is a sequence of the group and has the trajectory's reward: history that was
rewritten, or a sub-agent, makes the group larger. What the model sampled is let through by the mask and
has the logprob that was recorded; all else is context.
"""

from typing import Any

import numpy as np

from pool.core.groups import Group, Judgement, judge_member
from pool.core.rows import Row, build_rows, find_training_problem
from pool.core.scored_groups import MASKED
from pool.core.trajectories import Trajectory
from schemas import DecidedGroup, ScoredGroup

CHANNEL = "atropos"
"""Of these groups. A trainer of ours reads the originals, and leaves other channels alone."""
NO_LOGPROB = 1.0
"""Where the mask lets nothing through."""


def trainable(group: Group, member: Trajectory) -> Judgement:
    """Whether a member is handed on: only what a trainer of ours would take, whatever its age."""
    judgement = judge_member(group, member)
    problem = find_training_problem(member) if judgement.verdict == "train" else None
    return judgement if problem is None else Judgement("invalid", problem)


def fields_of(group: Group, judged: DecidedGroup) -> dict[str, Any]:
    used = [group.members[m.trajectory_uid] for m in judged.members if m.verdict == "train"]
    rows = [(row, group.reward(member)) for member in used for row in build_rows(member)]
    return {
        "group_uid": f"{group.prompt_uid}/{group.closed_at}",
        "prompt_uid": group.prompt_uid,
        "channel": CHANNEL,
        "tokens": [row.ids.tobytes() for row, _ in rows],
        "masks": [_mask(row) for row, _ in rows],
        "scores": [reward for _, reward in rows],
        "inference_logprobs": [_logprobs(row) for row, _ in rows],
    }


def closed_at(record: ScoredGroup) -> int:
    """Where in `steps` the group closed; its name says it."""
    return int(record.group_uid.rpartition("/")[2])


def _mask(row: Row) -> bytes:
    return np.where(row.trainable, row.ids, MASKED).astype("<i4").tobytes()


def _logprobs(row: Row) -> bytes:
    return np.where(row.trainable, row.behaviour, NO_LOGPROB).astype("<f8").tobytes()
