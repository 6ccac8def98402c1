"""Totals over all groups of an environment, and rows of metrics about the newest ones."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev, quantiles
from typing import Any

from steplog.environment.rollouts.group import Group

RECENT = 60
"""Groups whose mean rewards are kept for the curve."""


class Statistics:
    """Totals since the start, and means over the groups since the last call of `row`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = clock()
        self.groups = 0
        self.rollouts = 0
        self.failed = 0
        self.dropped = 0
        self.tokens = 0
        self.rewards: list[float] = []
        """Mean rewards of the newest groups."""
        self._reward_sum = 0.0
        self._reward_count = 0
        self._row_began = self.began
        self._row_groups: list[Group[Any]] = []

    def add(self, group: Group[Any]) -> None:
        self.groups += 1
        self.rollouts += len(group.rollouts)
        self.dropped += sum(rollout.is_dropped for rollout in group.rollouts)
        self.failed += sum(rollout.is_failed for rollout in group.rollouts)
        self.tokens += sum(rollout.tokens for rollout in group.rollouts)
        if group.rewards:
            self.rewards = [*self.rewards[-RECENT:], fmean(group.rewards)]
            self._reward_sum += sum(group.rewards)
            self._reward_count += len(group.rewards)
        self._row_groups.append(group)

    @property
    def mean_reward(self) -> float | None:
        """The mean over all rollouts so far; None as long as none has a reward."""
        return self._reward_sum / self._reward_count if self._reward_count else None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self._clock() - self.began, 1e-9)

    def row(self) -> dict[str, float]:
        """Metrics of the groups since the last call; empty if there were none."""
        groups, self._row_groups = self._row_groups, []
        seconds = max(self._clock() - self._row_began, 1e-9)
        self._row_began = self._clock()
        return _row(groups, seconds) if groups else {}


def _row(groups: Sequence[Group[Any]], seconds: float) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    usable = [rollout for rollout in rollouts if rollout.is_usable]
    calls = [call for rollout in rollouts for call in rollout.calls]
    tokens = sum(rollout.tokens for rollout in rollouts)
    rewards = [reward for group in groups for reward in group.rewards]
    values: dict[str, float] = {
        "groups": len(groups),
        "rollouts": len(rollouts),
        "failed_share": _share([rollout.is_failed for rollout in rollouts]),
        "dropped_share": _share([rollout.is_dropped for rollout in rollouts]),
        "truncated_share": _share([rollout.status == "truncated" for rollout in rollouts]),
        "retried_share": _share([rollout.attempt > 1 for rollout in rollouts]),
        "perf/calls_per_rollout": len(calls) / len(rollouts),
        "perf/tokens_per_rollout": tokens / len(rollouts),
        "perf/tokens_per_second": tokens / seconds,
        "perf/groups_per_minute": 60 * len(groups) / seconds,
        "perf/waited_s": fmean(group.waited_s for group in groups),
        **_spread("perf/rollout_s", [rollout.seconds for rollout in rollouts]),
        **_spread("perf/call_s", [call.seconds for call in calls]),
    }
    if rewards:
        spreads = [pstdev(group.rewards) for group in groups if len(group.rewards) > 1]
        values |= {"reward": fmean(rewards), "reward_max": max(rewards), "reward_min": min(rewards)}
        values |= {"reward_spread": fmean(spreads)} if spreads else {}
        # GRPO learns nothing from groups with equal rewards.
        values["equal_share"] = _share([spread == 0 for spread in spreads])
    own: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in usable:
        for name, value in rollout.metrics.items():
            own[name].append(value)
    return values | {name: fmean(own_values) for name, own_values in own.items()}


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    p95 = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {f"{name}_mean": fmean(values), f"{name}_p95": p95}
