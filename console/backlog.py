"""Backlog in the user's terms: open trajectories, running and waiting groups, oldest age.

It is a fold of the topics `trajectories`, `ledger` and `policy`, each read to its end in this
order, so that a Decision is always read after the trajectories it is about. A trajectory whose
first known record says that it is closed was decided earlier; except in the first reading, because
compaction keeps only the last record of each.

Groups are counted as gateways count them: a group is running while one of its trajectories is open or
missing, and waiting from then on until a Decision names it. Only the channel `train` has groups.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from console.snapshot import RunBacklog
from pool.core.marks import PolicyMarks
from schemas import DecidedGroup, Decision, PolicyVersion, Position, Registration

TRAIN = "train"


class TrackedTrajectory(NamedTuple):
    """What is kept of a trajectory's registration."""

    run: str
    prompt_uid: str
    channel: str
    begins: Position
    size: int
    is_open: bool
    written_at: int
    """Timestamp of the record in `trajectories`, in milliseconds."""


class Backlog:
    """The trajectories that are open, or about which no Decision was made yet."""

    def __init__(self) -> None:
        self._tracked: dict[str, TrackedTrajectory] = {}
        self._prompts: dict[str, set[str]] = defaultdict(set)
        self._marks: dict[str, PolicyMarks] = {}
        self._last_run: str | None = None
        self._is_first_reading = True

    def register(self, record: Registration, written_at: int) -> None:
        uid = record.trajectory_uid
        is_open = record.status is None
        was_decided = uid not in self._tracked and not is_open and not self._is_first_reading
        if was_decided or (record.channel != TRAIN and not is_open):
            self._forget(uid)
            return
        self._forget(uid)  # its client may change the prompt before the first call
        self._prompts[record.prompt_uid].add(uid)
        self._tracked[uid] = TrackedTrajectory(
            record.run, record.prompt_uid, record.channel, record.begins,
            record.group_size or 0, is_open, written_at,
        )  # fmt: skip

    def decide(self, decision: Decision) -> None:
        """Forget what is decided. Decisions of another run about a trajectory do not count."""
        uids = [member.trajectory_uid for member in decision.others]
        for group in decision.groups:
            of_prompt = self._prompts.get(group.prompt_uid, set())
            uids += [uid for uid in of_prompt if _was_left_out(self._tracked[uid], group)]
            uids += [member.trajectory_uid for member in group.members]
        tracked = {uid: self._tracked[uid] for uid in uids if uid in self._tracked}
        self._forget_all(uid for uid, one in tracked.items() if one.run == decision.run)

    def add_version(self, version: PolicyVersion) -> None:
        marks = self._marks.setdefault(version.run, PolicyMarks(version.run))
        marks.add(version)
        self._last_run = version.run

    def finish_first_reading(self) -> None:
        self._is_first_reading = False

    def oldest_written(self) -> int | None:
        """The oldest registration; no earlier Decision is about anything in the backlog."""
        return min((one.written_at for one in self._tracked.values()), default=None)

    def forget_before(self, written_at: int) -> None:
        """Forget what retention has deleted from the topic; after a restart it would be unknown too."""
        self._forget_all([u for u, one in self._tracked.items() if one.written_at < written_at])

    def runs(self) -> list[RunBacklog]:
        """The runs that have a backlog, and the run whose policy changed last."""
        by_run: dict[str, list[TrackedTrajectory]] = defaultdict(list)
        for one in self._tracked.values():
            by_run[one.run].append(one)
        names = by_run.keys() | ({self._last_run} if self._last_run is not None else set())
        return [self._summarize(name, by_run.get(name, [])) for name in sorted(names)]

    def _summarize(self, run: str, trajectories: list[TrackedTrajectory]) -> RunBacklog:
        marks = self._marks.get(run) or PolicyMarks(run)
        running, waiting = _count_groups(one for one in trajectories if one.channel == TRAIN)
        return RunBacklog(
            run=run,
            version=marks.live,
            incarnation=marks.incarnation,
            open_trajectories=sum(one.is_open for one in trajectories),
            groups_running=running,
            groups_waiting=waiting,
            oldest_versions=_oldest_age(marks, trajectories),
        )

    def _forget_all(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        trajectory = self._tracked.pop(uid, None)
        if trajectory is not None:
            uids = self._prompts[trajectory.prompt_uid]
            uids.discard(uid)
            if not uids:
                del self._prompts[trajectory.prompt_uid]


def _was_left_out(trajectory: TrackedTrajectory, group: DecidedGroup) -> bool:
    """Whether it ended without being usable, and its group was decided without it."""
    begins = trajectory.begins
    is_earlier = begins.partition == group.partition and begins.offset < group.closed_at
    return is_earlier and not trajectory.is_open


def _count_groups(members: Iterable[TrackedTrajectory]) -> tuple[int, int]:
    """The numbers of running groups and of groups that wait for a Decision."""
    groups: dict[str, list[TrackedTrajectory]] = defaultdict(list)
    for member in members:
        groups[member.prompt_uid].append(member)
    running = sum(
        any(one.is_open for one in group) or len(group) < max(one.size for one in group)
        for group in groups.values()
    )
    return running, len(groups) - running


def _oldest_age(marks: PolicyMarks, trajectories: Iterable[TrackedTrajectory]) -> int | None:
    """Versions since the oldest trajectory started."""
    if marks.live is None:
        return None
    versions = [marks.version_at(one.begins) for one in trajectories if one.channel == TRAIN]
    known = [version for version in versions if version is not None]
    return max(0, marks.live - min(known)) if known else None
