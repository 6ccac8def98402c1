"""The records of a topic in one order, which is the same every time it is read.

A partition has an order; a topic has none: what a reader gets first depends on brokers and networks.
Here the partitions are merged by the time at which their next message was written, ties by partition
number. So the read position in each partition determines what comes next, and a reader that resumes
there later gets the same messages in the same order.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from confluent_kafka import Message

from pool.readers.scan import Scan

MAX_BUFFER_BYTES = 32 * 2**20
"""Bytes that one partition may buffer before its fetching pauses. A pause discards what the client
has fetched, so it must be rare."""


def merge_by_time(scan: Scan) -> Iterator[Message]:
    buffers = {number: _Buffer() for number in scan.ranges}
    heads: list[tuple[int, int]] = []
    """Time of the next message of each partition, and the partition's number."""
    unknown = set(scan.ranges)
    """Partitions whose next message has not arrived yet."""
    for batch in scan.batches():
        for message in batch:
            number = message.partition() or 0
            buffers[number].add(message)
            if number in unknown:
                unknown.remove(number)
                heapq.heappush(heads, (_timestamp(message), number))
        unknown = {number for number in unknown if not scan.is_over(number)}
        while heads and not unknown:
            _, number = heapq.heappop(heads)
            yield buffers[number].take()
            following = buffers[number].first()
            if following is not None:
                heapq.heappush(heads, (_timestamp(following), number))
            elif not scan.is_over(number):
                unknown.add(number)
        scan.hold(
            {number for number, messages in buffers.items() if messages.bytes > MAX_BUFFER_BYTES}
        )


class _Buffer:
    """Messages of one partition that were fetched ahead of the merge."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self.bytes = 0

    def add(self, message: Message) -> None:
        self._messages.append(message)
        self.bytes += len(message)

    def take(self) -> Message:
        message = self._messages.popleft()
        self.bytes -= len(message)
        return message

    def first(self) -> Message | None:
        return self._messages[0] if self._messages else None


def _timestamp(message: Message) -> int:
    return message.timestamp()[1]
