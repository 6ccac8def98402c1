"""Collects Feedback that was read after its trajectory had ended.

It may come any distance after the End, and the topic is read only once. So a row is written with the
Feedback read so far, and files with rows that have got more are written again at the end (`amend`).
Until then Feedback is kept in a temporary file and not in memory: every trajectory may have some. So
are the rewards of Steps that late Feedback may change.
"""

import sqlite3

import msgspec

from pool.core.progress import Received
from pool.core.rewards import GivenRewards, feedback_of
from schemas import Feedback

CREATE_TABLES = """
create table feedback (
    uid text, partition integer, offset integer, record blob, primary key (uid, partition, offset)
) without rowid;
create table rewards (uid text primary key, given blob) without rowid;
"""


class LateFeedback:
    """Feedback on trajectories that had ended, by trajectory_uid."""

    def __init__(self) -> None:
        self.count = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Feedback)
        self._rewards_decoder = msgspec.msgpack.Decoder(GivenRewards)
        self._rows = sqlite3.connect("")  # a temporary file without a name
        self._rows.executescript(CREATE_TABLES)

    def add(self, received: Received) -> None:
        feedback = feedback_of(received)
        record = self._encoder.encode(feedback)
        row = (feedback.trajectory_uid, received.partition, received.offset, record)
        self._rows.execute("insert into feedback values (?, ?, ?, ?)", row)
        self.count += 1

    def of(self, uid: str) -> list[Received]:
        if not self.count:
            return []
        query = "select partition, offset, record from feedback where uid = ?"
        return [
            Received(self._decoder.decode(record), partition, offset)
            for partition, offset, record in self._rows.execute(query, (uid,))
        ]

    def keep_rewards(self, uid: str, given: GivenRewards) -> None:
        """Keeps the rewards of a trajectory that was exported, if those of its Steps may count."""
        if given.steps:
            row = (uid, self._encoder.encode(given))
            self._rows.execute("insert or replace into rewards values (?, ?)", row)

    def rewards(self, uid: str) -> GivenRewards | None:
        query = "select given from rewards where uid = ?"
        row = self._rows.execute(query, (uid,)).fetchone()
        return None if row is None else self._rewards_decoder.decode(row[0])
