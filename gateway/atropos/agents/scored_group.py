"""Converts a closed group of agents to a ScoredGroup, as if an environment had posted it.

Every training row of a trajectory becomes a sequence of the group with the trajectory's reward, so
rewritten history or a sub-agent makes the group larger. The mask lets through what the model sampled,
with the recorded logprobs; everything else is context.
"""

from typing import Any

import numpy as np

from pool.core.groups import Group, Judgement, judge_member
from pool.core.rows import Row, build_rows, find_training_problem
from pool.core.scored_groups import MASKED
from pool.core.trajectories import Trajectory
from schemas import DecidedGroup, ScoredGroup

PULLED = "atropos"
"""Channel of groups for trainers that pull batches. steplog's own trainer ignores it: it reads the
original records of agents, and posts that are meant for it are in its own channel."""
NO_LOGPROB = 1.0
"""The logprob of masked tokens, as Atropos has it."""


def judge_trainable_member(group: Group, member: Trajectory) -> Judgement:
    """Accepts a member that steplog's trainer would train, whatever its age."""
    judgement = judge_member(group, member)
    problem = find_training_problem(member) if judgement.verdict == "train" else None
    return judgement if problem is None else Judgement("invalid", problem)


def scored_group_fields(group: Group, decided: DecidedGroup) -> dict[str, Any]:
    """The fields of the ScoredGroup, without those that the log writer adds."""
    members = [group.members[m.trajectory_uid] for m in decided.members if m.verdict == "train"]
    rows = [(row, group.reward(member)) for member in members for row in build_rows(member)]
    return {
        "group_uid": f"{group.prompt_uid}/{group.closed_at}",
        "prompt_uid": group.prompt_uid,
        "channel": PULLED,
        "tokens": [row.ids.tobytes() for row, _ in rows],
        "masks": [_mask(row) for row, _ in rows],
        "scores": [reward for _, reward in rows],
        "inference_logprobs": [_logprobs(row) for row, _ in rows],
    }


def is_of_agents(record: ScoredGroup) -> bool:
    """Whether agents made the group: nobody posted it, so it has no fingerprint of a post."""
    return record.channel == PULLED and record.fingerprint is None


def closing_offset(record: ScoredGroup) -> int:
    """The offset in `steps` at which the group closed, which is part of its uid."""
    return int(record.group_uid.rpartition("/")[2])


def _mask(row: Row) -> bytes:
    return np.where(row.trainable, row.ids, MASKED).astype("<i4").tobytes()


def _logprobs(row: Row) -> bytes:
    return np.where(row.trainable, row.behaviour, NO_LOGPROB).astype("<f8").tobytes()
