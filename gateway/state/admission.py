"""Admission: whether a new group may begin.

Rollouts that are generated too early are stale before they can be trained, and dropping them is biased
against long ones. So a new group is refused while the running groups plus the ended, usable and
undecided ones number (eta + 1) * B. Unless a setting says otherwise, that is three batches of the
trainer, once one has started; before that there is nothing to be late for. A trajectory of an admitted
group is never refused.

The trainer decides its next batch while it trains the present one. Groups decided ahead keep their
places until the version before theirs is live, or else deciding early would let agents run ahead of
the trainer by one more batch.

As soon as an environment states a share (`pool.core.shares`), each environment may have its part of
the groups in flight and no more. Those that began none of the last groups do not count.

The count is a fold of the topics `trajectories`, `ledger` and `policy`: every gateway process has the
same count, and a restart rebuilds it. Groups that this process has just admitted count before the log
has them.
"""

import time
from collections import Counter
from collections.abc import Iterable

from gateway.waits import EventPace
from pool.core.groups import required_members
from pool.core.shares import NAMELESS, EnvironmentShare, divide, read_share
from schemas import Decision, PolicyVersion, Record, Registration

TRAIN = "train"
UNUSABLE = ("failed", "cancelled", "expired")
BATCHES_IN_FLIGHT = 3
"""Batches of the trainer that may be in flight (eta + 1), unless a limit is set."""
ACTIVE_LIMITS = 4
"""An environment is active as long as one of its groups is among the newest; this many times the limit
are looked at."""
MOST_GROUPS = 100_000
"""Groups that are remembered while no trainer has started, who would decide them."""


class Admission:
    """Counts the groups in flight. `limit` is (eta + 1) * B; None derives it from the trainer's
    batches. Only decisions of `run`'s trainer count: other runs may read the same groups at their own
    pace."""

    def __init__(self, run: str, limit: int | None, group_size: int, share: float) -> None:
        self._run = run
        self._limit = limit
        self._is_fixed = limit is not None
        self._group_size = group_size
        self._share = share
        self._groups: dict[str, dict[str, Registration]] = {}
        self._prompts: dict[str, str] = {}
        self._counted: dict[str, str] = {}
        """The environment of every group in flight, by prompt."""
        self._expected: dict[str, tuple[str, str]] = {}
        """Prompt and environment of registrations that are being written."""
        self._begun = 0
        """Groups that have begun so far."""
        self._environments: dict[str, tuple[int, EnvironmentShare]] = {}
        """The newest group of each environment, as a number, and the share that it states."""
        self._decisions = EventPace()
        self._live: int | None = None
        """The newest version that went live."""
        self._decided_ahead: list[tuple[int, list[str]]] = []
        """Versions that are trained later, each with the trajectories decided for it."""

    @property
    def groups_in_flight(self) -> int:
        """Groups that are running, waiting for a decision, or decided ahead."""
        return len(self._counted.keys() | {prompt for prompt, _ in self._expected.values()})

    @property
    def limit(self) -> int | None:
        """Most groups in flight; None before a trainer has started."""
        return self._limit

    def limit_of(self, share: EnvironmentShare) -> int | None:
        """Most groups in flight of one environment: its part, if any active environment states one."""
        if self._limit is None:
            return None
        oldest = self._begun - ACTIVE_LIMITS * self._limit
        active = {
            name: other for name, (newest, other) in self._environments.items() if newest > oldest
        } | {share.environment: share}
        if not any(other.is_stated for other in active.values()):
            return self._limit
        return max(1, round(divide(active.values())[share.environment] * self._limit))

    def expected_wait(self) -> float:
        """Seconds until the trainer decides groups again, judging by its last decisions."""
        return self._decisions.expected_wait(time.time())

    def admits(self, prompt_uid: str, share: EnvironmentShare = NAMELESS) -> bool:
        limit = self.limit_of(share)
        if self._limit is None or limit is None or prompt_uid in self._groups:
            return True
        if any(prompt == prompt_uid for prompt, _ in self._expected.values()):
            return True
        own = Counter((self._counted | dict(self._expected.values())).values())
        return self.groups_in_flight < self._limit and own[share.environment] < limit

    def expect(self, uid: str, prompt_uid: str, share: EnvironmentShare = NAMELESS) -> None:
        """Counts a trajectory whose registration is being written."""
        self._expected[uid] = (prompt_uid, share.environment)

    def forget(self, uid: str) -> None:
        """Stops counting a trajectory whose registration could not be written."""
        self._expected.pop(uid, None)

    def apply(self, record: Record) -> None:
        """Folds a record of `trajectories`, `ledger` or `policy` into the count."""
        if isinstance(record, Registration) and record.run == self._run:
            self._register(record)
        elif isinstance(record, Decision) and record.run == self._run:
            self._decide(record)
        elif isinstance(record, PolicyVersion) and record.run == self._run:
            self._follow_trainer(record)

    def _follow_trainer(self, record: PolicyVersion) -> None:
        if record.groups_per_batch is not None and not self._is_fixed:
            self._limit = BATCHES_IN_FLIGHT * record.groups_per_batch
        if record.phase == "live":
            self._live = record.version
            self._release()

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
        if record.prompt_uid not in self._groups:
            self._begin_group(read_share(record.metadata))
        self._prompts[uid] = record.prompt_uid
        self._groups.setdefault(record.prompt_uid, {})[uid] = record
        self._recount(record.prompt_uid)

    def _begin_group(self, share: EnvironmentShare) -> None:
        self._begun += 1
        self._environments[share.environment] = (self._begun, share)
        while self._limit is None and len(self._groups) >= MOST_GROUPS:
            self._remove_all(list(next(iter(self._groups.values()))))

    def _decide(self, decision: Decision) -> None:
        if decision.groups:
            self._decisions.record(decision.created_at / 1000)
        decided = [member.trajectory_uid for member in decision.others]
        for group in decision.groups:
            ended = self._groups.get(group.prompt_uid, {}).values()
            decided += [r.trajectory_uid for r in ended if r.status is not None]
            decided += [member.trajectory_uid for member in group.members]
        self._decided_ahead.append((decision.version or 0, decided))
        self._release()

    def _release(self) -> None:
        """Gives up the places of decided groups, except those of batches that are trained later."""
        decided, self._decided_ahead = self._decided_ahead, []
        for version, uids in decided:
            if self._is_ahead(version):
                self._decided_ahead.append((version, uids))
            else:
                self._remove_all(uids)

    def _is_ahead(self, version: int) -> bool:
        return self._live is not None and version > self._live + 1

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
        members = self._groups.get(prompt_uid, {})
        if self._is_in_flight(members):
            newest = next(reversed(members.values()))
            self._counted[prompt_uid] = read_share(newest.metadata).environment
        else:
            self._counted.pop(prompt_uid, None)

    def _is_in_flight(self, members: dict[str, Registration]) -> bool:
        """Whether the group is running, or ended with enough usable members to be trained."""
        if not members:
            return False
        size = max(r.group_size or self._group_size for r in members.values())
        usable = sum(r.status not in UNUSABLE for r in members.values())
        running = any(r.status is None for r in members.values()) or len(members) < size
        return running or usable >= required_members(self._share, size)
