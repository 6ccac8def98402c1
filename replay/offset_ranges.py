"""The offsets that a topic holds at the moment, by partition."""

from pool.connection import Connection
from pool.readers.reader import read_bounds
from pool.readers.scan import OffsetRange

OffsetRanges = dict[int, OffsetRange]


def stored_ranges(connection: Connection, topic: str) -> OffsetRanges:
    return {number: OffsetRange(*bound) for number, bound in read_bounds(connection, topic).items()}
