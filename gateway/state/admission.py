"""Admission: whether a new group may begin.

Rollouts that are generated too early are stale before they can be trained, and dropping them is biased
against long ones. So a new group is refused while the running groups plus the ended, usable and
undecided ones number (eta + 1) * B. A trajectory of an admitted group is never refused.

The count is a fold of the topics `trajectories` and `ledger`: every gateway process has the same count,
and a restart rebuilds it. Groups that this process has just admitted count before the log has them.
"""

import time
from collections.abc import Iterable

from gateway.waits import EventPace
from pool.core.groups import required_members
from schemas import Decision, Record, Registration

TRAIN = "train"
UNUSABLE = ("failed", "cancelled", "expired")


class Admission:
    """Counts the groups in flight. `limit` is (eta + 1) * B; None admits everything. Only decisions
    of `run`'s trainer count: other runs may read the same groups at their own pace."""

    def __init__(self, run: str, limit: int | None, group_size: int, share: float) -> None:
        self._run = run
        self._limit = limit
        self._group_size = group_size
        self._share = share
        self._groups: dict[str, dict[str, Registration]] = {}
        self._prompts: dict[str, str] = {}
        self._counted: set[str] = set()
        self._expected: dict[str, str] = {}
        self._decisions = EventPace()

    @property
    def groups_in_flight(self) -> int:
        """Groups that are running or waiting for a decision."""
        return len(self._counted.union(self._expected.values()))

    @property
    def limit(self) -> int | None:
        return self._limit

    def admits(self, prompt_uid: str) -> bool:
        if self._limit is None or prompt_uid in self._groups:
            return True
        return prompt_uid in self._expected.values() or self.groups_in_flight < self._limit

    def expected_wait(self) -> float:
        """Seconds until the trainer decides groups again, judging by its last decisions."""
        return self._decisions.expected_wait(time.time())

    def expect(self, uid: str, prompt_uid: str) -> None:
        """Counts a trajectory whose registration is being written."""
        if self._limit is not None:
            self._expected[uid] = prompt_uid

    def forget(self, uid: str) -> None:
        """Stops counting a trajectory whose registration could not be written."""
        self._expected.pop(uid, None)

    def apply(self, record: Record) -> None:
        """Folds a record of `trajectories` or `ledger` into the count."""
        if self._limit is None:
            return
        if isinstance(record, Registration) and record.run == self._run:
            self._register(record)
        elif isinstance(record, Decision) and record.run == self._run:
            self._decide(record)

    def _register(self, record: Registration) -> None:
        uid = record.trajectory_uid
        self.forget(uid)
        earlier_prompt = self._prompts.get(uid)
        if earlier_prompt not in (None, record.prompt_uid):
            self._remove(uid)  # its client chose another prompt before the first call
        is_late_close = earlier_prompt is None and record.status is not None
        if record.channel != TRAIN or is_late_close:  # late: its group was decided before
            self._remove(uid)
            return
        self._prompts[uid] = record.prompt_uid
        self._groups.setdefault(record.prompt_uid, {})[uid] = record
        self._recount(record.prompt_uid)

    def _decide(self, decision: Decision) -> None:
        if decision.groups:
            self._decisions.record(decision.created_at / 1000)
        for group in decision.groups:
            ended = self._groups.get(group.prompt_uid, {}).values()
            self._remove_all([r.trajectory_uid for r in ended if r.status is not None])
            self._remove_all(member.trajectory_uid for member in group.members)
        self._remove_all(member.trajectory_uid for member in decision.others)

    def _remove_all(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._remove(uid)

    def _remove(self, uid: str) -> None:
        prompt_uid = self._prompts.pop(uid, None)
        if prompt_uid is None:
            return
        members = self._groups[prompt_uid]
        del members[uid]
        if not members:
            del self._groups[prompt_uid]
        self._recount(prompt_uid)

    def _recount(self, prompt_uid: str) -> None:
        if self._is_in_flight(self._groups.get(prompt_uid, {})):
            self._counted.add(prompt_uid)
        else:
            self._counted.discard(prompt_uid)

    def _is_in_flight(self, members: dict[str, Registration]) -> bool:
        """Whether the group is running, or ended with enough usable members to be trained."""
        if not members:
            return False
        size = max(r.group_size or self._group_size for r in members.values())
        usable = sum(r.status not in UNUSABLE for r in members.values())
        running = any(r.status is None for r in members.values()) or len(members) < size
        return running or usable >= required_members(self._share, size)
