"""Verifies that a copy names no deleted data: checks every message as a record and as bytes."""

from pool.connection import Connection
from pool.readers.scan import OffsetRange, Scan
from replay.deletion.criteria import DeletionCriteria, decode_or_none
from replay.deletion.topic_copy import match_bytes
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress

MAX_POSITIONS_SHOWN = 5


def verify_topic(
    connection: Connection, topic: str, ranges: dict[int, OffsetRange], criteria: DeletionCriteria
) -> int:
    """Returns the number of checked records; raises Fatal with the positions of matching ones."""
    codec = connection.codec()
    checked, positions = 0, []
    with (
        Scan(connection, topic, ranges) as scan,
        show_progress(f"verifying {topic}", scan.total) as update,
    ):
        for message in scan:
            checked += 1
            value = message.value()
            record = decode_or_none(codec, value) if value is not None else None
            is_named = record is not None and (
                criteria.match(record) or criteria.scrub(record) != record
            )
            if is_named or match_bytes(message, criteria):
                positions.append(f"offset {message.offset()} of partition {message.partition()}")
            update(scan.done)
    if positions:
        raise Fatal(
            f"{connection.topic_name(topic)} still names deleted data in {len(positions):,} records: "
            f"{', '.join(positions[:MAX_POSITIONS_SHOWN])}. Delete the topics of this copy, or "
            "delete what these records name as well, and run the command again."
        )
    return checked
