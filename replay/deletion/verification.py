"""Whether what must go is gone: every record of a topic is looked at, as a record and as bytes."""

from pool.connection import Connection
from pool.readers.scan import OffsetRange, Scan
from replay.deletion.criteria import Forbidden, decoded
from replay.deletion.topic_copy import holds
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress

SHOWN = 5


def prove(
    connection: Connection, topic: str, spans: dict[int, OffsetRange], forbidden: Forbidden
) -> int:
    """How many records were looked at; that one is still there is an error that says where."""
    codec = connection.codec()
    looked, left = 0, []
    with (
        Scan(connection, topic, spans) as scan,
        show_progress(f"looking at {topic}", scan.total) as moved,
    ):
        for message in scan:
            looked += 1
            value = message.value()
            record = decoded(codec, value) if value is not None else None
            told = record is not None and (
                forbidden.has(record) or forbidden.scrubbed(record) != record
            )
            if told or holds(message, forbidden):
                left.append(f"offset {message.offset()} of partition {message.partition()}")
            moved(scan.done)
    if left:
        raise Fatal(
            f"{connection.topic_name(topic)} still names what must go, in {len(left):,} records: "
            f"{', '.join(left[:SHOWN])}; delete that copy, or what these say, and begin again"
        )
    return looked
