"""Whether a new group may begin.

What is generated too early is stale before it can be trained, and throwing it away hits long rollouts
hardest. So a new group waits while the groups that run, and those that ended usable and undecided,
number (eta + 1) * B. A trajectory of a group that was admitted is never refused.

The count is a fold of `trajectories` and `ledger`: every gateway has the same one, and a restart
gives it back. Groups that were admitted here a moment ago are counted before the log says so.
"""

from collections.abc import Iterable

from pool.core.groups import required_members
from schemas import Decision, Record, Registration

TRAIN = "train"
UNUSABLE = ("failed", "cancelled", "expired")


class Admission:
    """`limit` is (eta + 1) * B; None admits everything. Only the trainer of `run` is waited for: others
    may read the same groups, at their own pace."""

    def __init__(self, run: str, limit: int | None, group_size: int, share: float) -> None:
        self._run = run
        self._limit = limit
        self._group_size = group_size
        self._share = share
        self._groups: dict[str, dict[str, Registration]] = {}
        self._prompts: dict[str, str] = {}
        self._counted: set[str] = set()
        self._expected: dict[str, str] = {}

    @property
    def groups(self) -> int:
        """Groups that run or wait for a decision."""
        return len(self._counted.union(self._expected.values()))

    def admits(self, prompt_uid: str) -> bool:
        if self._limit is None or prompt_uid in self._groups:
            return True
        return prompt_uid in self._expected.values() or self.groups < self._limit

    def expect(self, uid: str, prompt_uid: str) -> None:
        """Its registration is on the way to the log."""
        if self._limit is not None:
            self._expected[uid] = prompt_uid

    def forget(self, uid: str) -> None:
        """Its registration did not get there."""
        self._expected.pop(uid, None)

    def apply(self, record: Record) -> None:
        if self._limit is None:
            return
        if isinstance(record, Registration) and record.run == self._run:
            self._register(record)
        elif isinstance(record, Decision) and record.run == self._run:
            self._decide(record)

    def _register(self, record: Registration) -> None:
        uid = record.trajectory_uid
        self.forget(uid)
        before = self._prompts.get(uid)
        if before not in (None, record.prompt_uid):
            self._leave(uid)  # its client chose another prompt before the first call
        if record.channel != TRAIN or (before is None and record.status is not None):
            self._leave(uid)  # or it was decided before, and its closing comes late
            return
        self._prompts[uid] = record.prompt_uid
        self._groups.setdefault(record.prompt_uid, {})[uid] = record
        self._count(record.prompt_uid)

    def _decide(self, decision: Decision) -> None:
        for group in decision.groups:
            ended = self._groups.get(group.prompt_uid, {}).values()
            self._leave_all([r.trajectory_uid for r in ended if r.status is not None])
            self._leave_all(member.trajectory_uid for member in group.members)
        self._leave_all(member.trajectory_uid for member in decision.others)

    def _leave_all(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._leave(uid)

    def _leave(self, uid: str) -> None:
        prompt_uid = self._prompts.pop(uid, None)
        if prompt_uid is None:
            return
        members = self._groups[prompt_uid]
        del members[uid]
        if not members:
            del self._groups[prompt_uid]
        self._count(prompt_uid)

    def _count(self, prompt_uid: str) -> None:
        if self._matters(self._groups.get(prompt_uid, {})):
            self._counted.add(prompt_uid)
        else:
            self._counted.discard(prompt_uid)

    def _matters(self, members: dict[str, Registration]) -> bool:
        """It runs, or it ended with enough members to be trained."""
        if not members:
            return False
        size = max(r.group_size or self._group_size for r in members.values())
        usable = sum(r.status not in UNUSABLE for r in members.values())
        running = any(r.status is None for r in members.values()) or len(members) < size
        return running or usable >= required_members(self._share, size)
