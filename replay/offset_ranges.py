"""All that a topic holds at this moment."""

from pool.connection import Connection
from pool.readers.reader import read_bounds
from pool.readers.scan import OffsetRange

Spans = dict[int, OffsetRange]


def spans_of(connection: Connection, topic: str) -> Spans:
    return {number: OffsetRange(*bound) for number, bound in read_bounds(connection, topic).items()}
