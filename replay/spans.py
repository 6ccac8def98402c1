"""All that a topic holds at this moment."""

import asyncio

from pool.connection import Connection
from pool.reader import open_topic
from pool.scan import Span

Spans = dict[int, Span]


def spans_of(connection: Connection, topic: str) -> Spans:
    async def read() -> Spans:
        async with open_topic(connection, topic) as reader:
            bounds = await reader.bounds(reader.partitions)
        return {number: Span(*bound) for number, bound in bounds.items()}

    return asyncio.run(read())
