"""The answer to an environment that polls its status, by which it starts and stops its workers."""

import math
from typing import Any, NamedTuple

from gateway.atropos.state.events import Env
from gateway.atropos.state.state import AtroposState

MIN_WEIGHT = 0.01


class EnvStatus(NamedTuple):
    answer: dict[str, Any]
    group_size: int
    """The environment's group size, or that of its largest queued group if that is larger."""


def env_status(state: AtroposState, env_id: int) -> EnvStatus | None:
    """Returns None if there is no such environment."""
    own = state.env(env_id)
    if own is None:
        return None
    own_id = env_id % len(state.envs)
    if state.has_own_trainer:
        return EnvStatus(_status_in_groups(state, own, own_id), own.group_size)
    queue = state.queue
    largest = max(1, queue.largest)
    group_size = max(own.group_size, queue.largest_of(own_id))
    own_sequences = queue.sequences[own_id]
    available = _available_from_others(state, own_id, largest)
    unit = max(1, group_size)
    answer = {
        "current_step": state.step,
        "queue_size": (own_sequences + available) // unit,
        "unallocated_fraction": 1.0 - min(1.0, sum(state.minimums().values())),
        "self_queue_size": own_sequences // unit,
        "max_group_size": largest,
        "env_weight": _weight(state, own),
    }
    return EnvStatus(answer, group_size)


def _status_in_groups(state: AtroposState, own: Env, own_id: int) -> dict[str, Any]:
    """For steplog's own trainer every group counts as one, whatever its size: the environment was told
    a batch size in groups of its own (`AtroposState.batch_size`)."""
    return {
        "current_step": state.step,
        "queue_size": len(state.queue),
        "unallocated_fraction": 1.0 - min(1.0, sum(state.minimums().values())),
        "self_queue_size": state.queue.groups_of(own_id),
        "max_group_size": max(1, own.group_size),
        "env_weight": _weight(state, own),
    }


def _available_from_others(state: AtroposState, own_id: int, largest: int) -> int:
    """Sequences that other environments have beyond their own minimums, in whole packs."""
    if largest == 1:
        return 0
    minimums = state.minimums()
    available = 0
    for env_id, sequences in state.queue.sequences.items():
        if env_id != own_id:
            share = 0.0 if env_id is None else minimums.get(env_id, 0.0)
            packs = math.ceil(sequences / largest) * largest
            available += max(0, packs - int(state.batch_size * share))
    return available


def _weight(state: AtroposState, own: Env) -> float:
    total = sum(env.max_context_len * max(0.0, env.weight) for _, env in state.active_envs())
    if total <= 0:
        return 1.0 if own.weight > 0 else MIN_WEIGHT
    return max(MIN_WEIGHT, own.max_context_len * own.weight / total)
