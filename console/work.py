"""What waits, in the language of the job: open trajectories, groups, and how old the oldest is.

A fold of `trajectories`, `ledger` and `policy`, each read to its end in this order. So whatever is
decided about a trajectory comes after it. A trajectory that is heard of first when it is closed was
decided before, except in the first reading: compaction leaves only the last word of each.

A group is what gateways count: it runs while a trajectory of it is open or missing, and waits from
then on until a Decision names it. Only the channel `train` has groups.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from console.look import RunWork
from pool.core.marks import PolicyMarks
from schemas import DecidedGroup, Decision, PolicyVersion, Position, Registration

TRAIN = "train"


class Known(NamedTuple):
    """What is kept of a registration."""

    run: str
    prompt_uid: str
    channel: str
    begins: Position
    size: int
    is_open: bool
    written_at: int
    """Milliseconds: the record's, in `trajectories`."""


class Work:
    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._prompts: dict[str, set[str]] = defaultdict(set)
        self._marks: dict[str, PolicyMarks] = {}
        self._last_run: str | None = None
        self._is_first_reading = True

    def register(self, record: Registration, written_at: int) -> None:
        uid = record.trajectory_uid
        is_open = record.status is None
        comes_late = uid not in self._known and not is_open and not self._is_first_reading
        if comes_late or (record.channel != TRAIN and not is_open):
            self._leave(uid)
            return
        self._leave(uid)  # its client may have chosen another prompt before the first call
        self._prompts[record.prompt_uid].add(uid)
        self._known[uid] = Known(
            record.run, record.prompt_uid, record.channel, record.begins,
            record.group_size or 0, is_open, written_at,
        )  # fmt: skip

    def decide(self, decision: Decision) -> None:
        """What another run makes of a trajectory is not what its own waits for."""
        named = [member.trajectory_uid for member in decision.others]
        for group in decision.groups:
            uids = self._prompts.get(group.prompt_uid, set())
            named += [uid for uid in uids if _fell_out(self._known[uid], group)]
            named += [member.trajectory_uid for member in group.members]
        known = {uid: self._known[uid] for uid in named if uid in self._known}
        self._leave_all(uid for uid, one in known.items() if one.run == decision.run)

    def open(self, version: PolicyVersion) -> None:
        marks = self._marks.setdefault(version.run, PolicyMarks(version.run))
        marks.add(version)
        self._last_run = version.run

    def everything_was_read(self) -> None:
        self._is_first_reading = False

    def oldest_written(self) -> int | None:
        """No Decision before it is about anything that waits."""
        return min((known.written_at for known in self._known.values()), default=None)

    def forget_before(self, written_at: int) -> None:
        """What the topic no longer holds: a restart would not know it either."""
        self._leave_all([u for u, known in self._known.items() if known.written_at < written_at])

    def runs(self) -> list[RunWork]:
        """Those in which something waits, and the one whose policy changed last."""
        by_run: dict[str, list[Known]] = defaultdict(list)
        for known in self._known.values():
            by_run[known.run].append(known)
        names = by_run.keys() | ({self._last_run} if self._last_run is not None else set())
        return [self._run(name, by_run.get(name, [])) for name in sorted(names)]

    def _run(self, run: str, known: list[Known]) -> RunWork:
        marks = self._marks.get(run) or PolicyMarks(run)
        running, waiting = _count_groups(one for one in known if one.channel == TRAIN)
        return RunWork(
            run=run,
            version=marks.live,
            incarnation=marks.incarnation,
            open_trajectories=sum(one.is_open for one in known),
            groups_running=running,
            groups_waiting=waiting,
            oldest_versions=_oldest(marks, known),
        )

    def _leave_all(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._leave(uid)

    def _leave(self, uid: str) -> None:
        known = self._known.pop(uid, None)
        if known is not None:
            uids = self._prompts[known.prompt_uid]
            uids.discard(uid)
            if not uids:
                del self._prompts[known.prompt_uid]


def _fell_out(known: Known, group: DecidedGroup) -> bool:
    """It ended, was of no use, and its group is decided without it."""
    is_here = known.begins.partition == group.partition
    return is_here and known.begins.offset < group.closed_at and not known.is_open


def _count_groups(members: Iterable[Known]) -> tuple[int, int]:
    """How many run, and how many wait for a Decision."""
    groups: dict[str, list[Known]] = defaultdict(list)
    for member in members:
        groups[member.prompt_uid].append(member)
    running = sum(
        any(one.is_open for one in group) or len(group) < max(one.size for one in group)
        for group in groups.values()
    )
    return running, len(groups) - running


def _oldest(marks: PolicyMarks, known: Iterable[Known]) -> int | None:
    if marks.live is None:
        return None
    versions = [marks.version_at(one.begins) for one in known if one.channel == TRAIN]
    found = [version for version in versions if version is not None]
    return max(0, marks.live - min(found)) if found else None
