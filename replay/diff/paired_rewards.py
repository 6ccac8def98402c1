"""Pairs the rewards of two topics, trajectory by trajectory, in constant memory.

A trajectory is identified by the position of its End in `steps`, which both topics record. So it does
not matter in which order the workers wrote: the rows of both go into a temporary SQLite file, which is
read prompt by prompt. SQLite keeps a few megabytes of it in memory, and it disappears with the process.
"""

import sqlite3
from collections.abc import Iterator
from itertools import groupby
from typing import Literal, NamedTuple

from pool.core.trajectories import StrayRecord, Trajectory, source_position
from schemas import Feedback

Side = Literal["old", "new"]

CREATE_TABLES = """
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
ADD_TRAJECTORY = """
INSERT INTO ended (partition, offset, began, uid, prompt, size, in_{0}, sound_{0}, reward_{0})
VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?)
ON CONFLICT DO UPDATE SET in_{0} = 1, sound_{0} = excluded.sound_{0}, reward_{0} = excluded.reward_{0}
"""
LAST_FEEDBACK = """(
    SELECT reward FROM feedback WHERE uid = ended.uid AND side = '{0}'
    AND feedback.partition = ended.partition ORDER BY offset DESC LIMIT 1
)"""
READ_PAIRS = f"""
SELECT partition, offset, began, uid, prompt, size,
    in_old, sound_old, coalesce({LAST_FEEDBACK.format("old")}, reward_old),
    in_new, sound_new, coalesce({LAST_FEEDBACK.format("new")}, reward_new)
FROM ended ORDER BY partition, prompt, offset
"""


class SideReward(NamedTuple):
    """A trajectory on one side. It can be trained only if it is sound and has a reward."""

    is_sound: bool
    reward: float | None

    @property
    def is_usable(self) -> bool:
        return self.is_sound and self.reward is not None


class RewardPair(NamedTuple):
    """A trajectory on both sides; None where it is missing."""

    partition: int
    offset: int
    began: int
    uid: str
    prompt: str
    size: int | None
    old: SideReward | None
    new: SideReward | None


class RewardPairs:
    """Collects the trajectories and Feedback of both sides."""

    def __init__(self) -> None:
        self._file = sqlite3.connect("", isolation_level=None)  # no name: a temporary file
        self._file.executescript(CREATE_TABLES + "BEGIN;")

    def add(self, side: Side, item: Trajectory | StrayRecord) -> None:
        if isinstance(item, Trajectory):
            self._add_trajectory(side, item)
        elif isinstance(item.received.record, Feedback):
            self._add_feedback(side, item.received.record, *_position(item))

    def _add_trajectory(self, side: Side, trajectory: Trajectory) -> None:
        ended, end = trajectory.ended, trajectory.end
        is_sound = end.status in ("completed", "truncated") and trajectory.problem is None
        offsets = (ended.partition, ended.offset, trajectory.began.offset)
        ids = (trajectory.uid, trajectory.prompt_uid, trajectory.group_size)
        scored = (is_sound and bool(trajectory.steps), end.reward)
        self._file.execute(ADD_TRAJECTORY.format(side), (*offsets, *ids, *scored))
        for received in trajectory.feedback:
            assert isinstance(received.record, Feedback)
            position = source_position(received)
            self._add_feedback(side, received.record, position.partition, position.offset)

    def _add_feedback(self, side: Side, feedback: Feedback, partition: int, offset: int) -> None:
        if feedback.step_id is None:
            row = (feedback.trajectory_uid, side, partition, offset, feedback.reward)
            self._file.execute("INSERT OR IGNORE INTO feedback VALUES (?, ?, ?, ?, ?)", row)

    def by_prompt(self) -> Iterator[list[RewardPair]]:
        """The trajectories of one prompt after the other, in the order in which they ended."""
        rows = (_pair(row) for row in self._file.execute(READ_PAIRS))
        for _, pairs in groupby(rows, key=lambda pair: (pair.partition, pair.prompt)):
            yield list(pairs)


def _position(stray: StrayRecord) -> tuple[int, int]:
    position = source_position(stray.received)
    return position.partition, position.offset


def _pair(
    row: tuple[int, int, int, str, str, int | None, int, int, float, int, int, float],
) -> RewardPair:
    in_old, sound_old, old, in_new, sound_new, new = row[6:]
    return RewardPair(
        *row[:6],
        SideReward(bool(sound_old), old) if in_old else None,
        SideReward(bool(sound_new), new) if in_new else None,
    )
