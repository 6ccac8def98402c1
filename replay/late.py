"""Feedback that came after its trajectory had ended.

It may lie any distance behind the End, so it is gathered before the trajectories are read: from the
same stretches of the topic, knowing it by its schema without decoding the rest. It is kept in a file
that the system removes, not in memory, since every trajectory may have some.
"""

import sqlite3

from confluent_kafka import Message

from pool.connection import Connection
from pool.progress import Received
from pool.scan import Scan, Span, received
from schemas import Codec, Feedback, SchemaError

TABLE = "create table feedback (uid text, partition integer, offset integer, value blob)"
INDEX = "create index by_uid on feedback (uid)"


class LateFeedback:
    """What the range says about a trajectory, by its uid."""

    def __init__(self, codec: Codec) -> None:
        self.count = 0
        self._codec = codec
        self._rows = sqlite3.connect("")  # a temporary file without a name
        self._rows.execute(TABLE)

    def add(self, message: Message) -> None:
        value = message.value()
        if value is None or not self._is_feedback(value):
            return
        try:
            one = received(message, self._codec)
        except SchemaError:
            return
        assert isinstance(one.record, Feedback)
        row = (one.record.trajectory_uid, one.partition, one.offset, value)
        self._rows.execute("insert into feedback values (?, ?, ?, ?)", row)
        self.count += 1

    def _is_feedback(self, value: bytes) -> bool:
        try:
            return self._codec.type_of(value) is Feedback
        except SchemaError:
            return False

    def complete(self) -> None:
        self._rows.execute(INDEX)

    def on(self, uid: str) -> list[Received]:
        if not self.count:
            return []
        asked = "select partition, offset, value from feedback where uid = ?"
        return [
            Received(self._codec.decode(value), partition, offset)
            for partition, offset, value in self._rows.execute(asked, (uid,))
        ]


def gather(
    connection: Connection, topic: str, spans: dict[int, Span], codec: Codec
) -> LateFeedback:
    late = LateFeedback(codec)
    with Scan(connection, topic, spans) as scan:
        for message in scan:
            late.add(message)
    late.complete()
    return late
