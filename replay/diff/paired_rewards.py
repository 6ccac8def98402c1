"""The rewards of two topics, trajectory by trajectory, in memory that does not grow with the log.

A trajectory is known by where its End lies in `steps`, which both topics say. So it does not matter in
which order the workers wrote: rows of both are put into a temporary file and read prompt by prompt.
SQLite holds a few megabytes of it in memory; nobody else sees the file, and it goes with the process.
"""

import sqlite3
from collections.abc import Iterator
from itertools import groupby
from typing import Literal, NamedTuple

from pool.core.trajectories import StrayRecord, Trajectory, source_position
from schemas import Feedback

Side = Literal["old", "new"]

MAKE = """
CREATE TABLE ended (
    partition INT, offset INT, began INT, uid TEXT, prompt TEXT, size INT,
    in_old INT DEFAULT 0, sound_old INT, reward_old REAL,
    in_new INT DEFAULT 0, sound_new INT, reward_new REAL,
    PRIMARY KEY (partition, offset)
) WITHOUT ROWID;
CREATE TABLE feedback (
    uid TEXT, side TEXT, partition INT, offset INT, reward REAL,
    PRIMARY KEY (uid, side, partition, offset)
) WITHOUT ROWID;
"""
ADD = """
INSERT INTO ended (partition, offset, began, uid, prompt, size, in_{0}, sound_{0}, reward_{0})
VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?)
ON CONFLICT DO UPDATE SET in_{0} = 1, sound_{0} = excluded.sound_{0}, reward_{0} = excluded.reward_{0}
"""
LAST = """(
    SELECT reward FROM feedback WHERE uid = ended.uid AND side = '{0}'
    AND feedback.partition = ended.partition ORDER BY offset DESC LIMIT 1
)"""
READ = f"""
SELECT partition, offset, began, uid, prompt, size,
    in_old, sound_old, coalesce({LAST.format("old")}, reward_old),
    in_new, sound_new, coalesce({LAST.format("new")}, reward_new)
FROM ended ORDER BY partition, prompt, offset
"""


class Scored(NamedTuple):
    """A trajectory on one side. Only a sound one can be trained; without a reward it cannot either."""

    is_sound: bool
    reward: float | None

    @property
    def is_usable(self) -> bool:
        return self.is_sound and self.reward is not None


class Pair(NamedTuple):
    """A trajectory on both sides; None: it is not there."""

    partition: int
    offset: int
    began: int
    uid: str
    prompt: str
    size: int | None
    old: Scored | None
    new: Scored | None


class SideBySide:
    def __init__(self) -> None:
        self._file = sqlite3.connect("", isolation_level=None)  # no name: a temporary file
        self._file.executescript(MAKE + "BEGIN;")

    def add(self, side: Side, item: Trajectory | StrayRecord) -> None:
        if isinstance(item, Trajectory):
            self._add_trajectory(side, item)
        elif isinstance(item.received.record, Feedback):
            self._add_feedback(side, item.received.record, *_place(item))

    def _add_trajectory(self, side: Side, trajectory: Trajectory) -> None:
        ended, end = trajectory.ended, trajectory.end
        sound = end.status in ("completed", "truncated") and trajectory.problem is None
        place = (ended.partition, ended.offset, trajectory.began.offset)
        names = (trajectory.uid, trajectory.prompt_uid, trajectory.group_size)
        found = (sound and bool(trajectory.steps), end.reward)
        self._file.execute(ADD.format(side), (*place, *names, *found))
        for received in trajectory.feedback:
            assert isinstance(received.record, Feedback)
            at = source_position(received)
            self._add_feedback(side, received.record, at.partition, at.offset)

    def _add_feedback(self, side: Side, feedback: Feedback, partition: int, offset: int) -> None:
        if feedback.step_id is None:
            row = (feedback.trajectory_uid, side, partition, offset, feedback.reward)
            self._file.execute("INSERT OR IGNORE INTO feedback VALUES (?, ?, ?, ?, ?)", row)

    def prompts(self) -> Iterator[list[Pair]]:
        """The trajectories of one prompt after the other, each in the order in which they ended."""
        rows = (_pair(row) for row in self._file.execute(READ))
        for _, pairs in groupby(rows, key=lambda pair: (pair.partition, pair.prompt)):
            yield list(pairs)


def _place(stray: StrayRecord) -> tuple[int, int]:
    at = source_position(stray.received)
    return at.partition, at.offset


def _pair(
    row: tuple[int, int, int, str, str, int | None, int, int, float, int, int, float],
) -> Pair:
    in_old, sound_old, old, in_new, sound_new, new = row[6:]
    return Pair(
        *row[:6],
        Scored(bool(sound_old), old) if in_old else None,
        Scored(bool(sound_new), new) if in_new else None,
    )
