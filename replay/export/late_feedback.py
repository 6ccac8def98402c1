"""Feedback that came after its trajectory had ended.

It may lie any distance behind the End, and the topic is read once. So a row is written with what is
known by then, and files whose rows have got more are written again at the end (`amend`). Until then
Feedback waits in a file that the system removes, not in memory: every trajectory may have some.
"""

import sqlite3

import msgspec

from pool.core.groups import feedback_of
from pool.core.progress import Received
from schemas import Feedback

TABLE = """
create table feedback (
    uid text, partition integer, offset integer, record blob, primary key (uid, partition, offset)
) without rowid
"""


class LateFeedback:
    """What was read about trajectories that had ended, by their uids."""

    def __init__(self) -> None:
        self.count = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Feedback)
        self._rows = sqlite3.connect("")  # a temporary file without a name
        self._rows.execute(TABLE)

    def add(self, received: Received) -> None:
        feedback = feedback_of(received)
        record = self._encoder.encode(feedback)
        row = (feedback.trajectory_uid, received.partition, received.offset, record)
        self._rows.execute("insert into feedback values (?, ?, ?, ?)", row)
        self.count += 1

    def on(self, uid: str) -> list[Received]:
        if not self.count:
            return []
        asked = "select partition, offset, record from feedback where uid = ?"
        return [
            Received(self._decoder.decode(record), partition, offset)
            for partition, offset, record in self._rows.execute(asked, (uid,))
        ]
