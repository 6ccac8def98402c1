"""Pairs the rewards of two topics, trajectory by trajectory, in constant memory.

A trajectory is identified by the position of its End in `steps`, which both topics record. So it does
not matter in which order the workers wrote: the rows of both go into a temporary SQLite file, which is
read prompt by prompt. SQLite keeps a few megabytes of it in memory, and it disappears with the process.
"""

import sqlite3
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal, NamedTuple

import msgspec

from pool.core.progress import Received
from pool.core.rewards import SCORED_STATUSES, GivenRewards, feedback_of, given_rewards
from pool.core.trajectories import StrayRecord, Trajectory, source_position
from schemas import Feedback

Side = Literal["old", "new"]

CREATE_TABLES = """
CREATE TABLE ended (
    partition INT, offset INT, began INT, uid TEXT, prompt TEXT, size INT,
    sound_old INT, given_old BLOB, sound_new INT, given_new BLOB,
    PRIMARY KEY (partition, offset)
) WITHOUT ROWID;
CREATE TABLE feedback (
    uid TEXT, side TEXT, partition INT, feedback_id TEXT, offset INT, record BLOB,
    PRIMARY KEY (uid, side, partition, feedback_id)
) WITHOUT ROWID;
"""
ADD_TRAJECTORY = """
INSERT INTO ended (partition, offset, began, uid, prompt, size, sound_{0}, given_{0})
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET sound_{0} = excluded.sound_{0}, given_{0} = excluded.given_{0}
"""
READ_PAIRS = """
SELECT partition, offset, began, uid, prompt, size, sound_old, given_old, sound_new, given_new
FROM ended ORDER BY partition, prompt, offset
"""
READ_FEEDBACK = """
SELECT record FROM feedback WHERE uid = ? AND side = ? AND partition = ? ORDER BY offset
"""

encode = msgspec.msgpack.Encoder().encode
decode_given = msgspec.msgpack.Decoder(GivenRewards).decode
decode_feedback = msgspec.msgpack.Decoder(Feedback).decode


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
        self._has_feedback = False
        self._file = sqlite3.connect("", isolation_level=None)  # no name: a temporary file
        self._file.executescript(CREATE_TABLES + "BEGIN;")

    def add(self, side: Side, item: Trajectory | StrayRecord) -> None:
        if isinstance(item, Trajectory):
            self._add_trajectory(side, item)
        elif isinstance(item.received.record, Feedback):
            self._add_feedback(side, item.received)

    def _add_trajectory(self, side: Side, trajectory: Trajectory) -> None:
        ended = trajectory.ended
        is_sound = trajectory.status in SCORED_STATUSES and trajectory.problem is None
        offsets = (ended.partition, ended.offset, trajectory.began.offset)
        ids = (trajectory.uid, trajectory.prompt_uid, trajectory.group_size)
        given = (is_sound and bool(trajectory.steps), encode(given_rewards(trajectory)))
        self._file.execute(ADD_TRAJECTORY.format(side), (*offsets, *ids, *given))
        for received in trajectory.feedback:
            self._add_feedback(side, received)

    def _add_feedback(self, side: Side, received: Received) -> None:
        """Feedback from before the End is added too, so that a later copy of it is recognized."""
        feedback, position = feedback_of(received), source_position(received)
        key = (feedback.trajectory_uid, side, position.partition, feedback.feedback_id)
        row = (*key, position.offset, encode(feedback))
        self._file.execute("INSERT OR IGNORE INTO feedback VALUES (?, ?, ?, ?, ?, ?)", row)
        self._has_feedback = True

    def by_prompt(self) -> Iterator[list[RewardPair]]:
        """The trajectories of one prompt after the other, in the order in which they ended."""
        rows = (self._pair(row) for row in self._file.execute(READ_PAIRS))
        for _, pairs in groupby(rows, key=lambda pair: (pair.partition, pair.prompt)):
            yield list(pairs)

    def _pair(self, row: tuple[Any, ...]) -> RewardPair:
        *position_and_ids, sound_old, given_old, sound_new, given_new = row
        partition, _, _, uid, _, _ = position_and_ids
        sides = (
            self._side_reward("old", partition, uid, sound_old, given_old),
            self._side_reward("new", partition, uid, sound_new, given_new),
        )
        return RewardPair._make([*position_and_ids, *sides])

    def _side_reward(
        self, side: Side, partition: int, uid: str, is_sound: int, given: bytes | None
    ) -> SideReward | None:
        if given is None:
            return None
        rewards = decode_given(given)
        if self._has_feedback:
            stored = self._file.execute(READ_FEEDBACK, (uid, side, partition))
            rewards = rewards.with_feedback(decode_feedback(record) for (record,) in stored)
        return SideReward(bool(is_sound), rewards.counting)
