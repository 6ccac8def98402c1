"""Statistics of all groups decided since the last batch, trained or not."""

import time
from collections import Counter

from pool.core.marks import Age, PolicyMarks, UnknownAge
from schemas import DecidedGroup
from trainer import metrics
from trainer.decisions.pending import ReadyGroup


class DecisionStatistics:
    """Each closed group is counted once, when its verdict is final."""

    def __init__(self) -> None:
        self.ages: list[Age] = []
        """Of the trained trajectories."""
        self._groups: Counter[str] = Counter()
        self._members: Counter[str] = Counter()
        self._steps = self._orphans = 0
        self._rewards: list[float] = []
        self._waits: list[float] = []

    def add(
        self, ready: ReadyGroup, decided: DecidedGroup, marks: PolicyMarks, version: int
    ) -> None:
        metrics.groups.labels(decided.verdict).inc()
        self._groups[decided.verdict] += 1
        for member in ready.group.members.values():
            self._members[member.status] += 1
            self._steps += len(member.steps)
            self._orphans += len(member.orphans)
            reward = ready.group.reward(member)
            if reward is not None:
                self._rewards.append(reward)
        if decided.verdict == "train":
            self._waits.append(time.monotonic() - ready.since)
            self._add_ages(ready, decided, marks, version)

    def _add_ages(
        self, ready: ReadyGroup, decided: DecidedGroup, marks: PolicyMarks, version: int
    ) -> None:
        for member in decided.members:
            if member.verdict == "train":
                try:
                    trajectory = ready.group.members[member.trajectory_uid]
                    self.ages.append(marks.age(trajectory, version))
                except UnknownAge:
                    pass  # it belongs to an accepted run, whose versions are not ours

    def metrics(self) -> dict[str, float]:
        usable = self._groups["train"] + self._groups["no_variance"]
        members = sum(self._members.values())
        failed = self._members["failed"] + self._members["cancelled"]
        quotients = {
            "reward_mean_all": (sum(self._rewards), len(self._rewards)),
            "no_variance_fraction": (self._groups["no_variance"], usable),
            "failed_fraction": (failed, members),
            "orphan_fraction": (self._orphans, self._steps),
            "group_wait_seconds": (sum(self._waits), len(self._waits)),
        }
        return {name: part / total for name, (part, total) in quotients.items() if total}
