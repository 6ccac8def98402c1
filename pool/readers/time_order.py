"""The records of a topic in one order, the same whenever it is read.

A partition has an order, a topic has none: what a reader gets first depends on brokers and networks.
Here the partition goes next whose next message was written first, ties by number. So where reading
stands in each partition says all about what comes next, and whoever goes on from there later gets the
same messages in the same order.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from confluent_kafka import Message

from pool.readers.scan import Scan

AHEAD = 32 * 2**20
"""Bytes of one partition that wait for another's turn before fetching it pauses. A pause throws away
what the client has fetched, so it must be rare."""


def merge_by_time(scan: Scan) -> Iterator[Message]:
    waiting = {number: _Waiting() for number in scan.spans}
    heads: list[tuple[int, int]] = []
    """When the next message of a partition was written, and which partition it is."""
    unknown = set(scan.spans)
    """Partitions whose next message has not come yet."""
    for batch in scan.batches():
        for message in batch:
            number = message.partition() or 0
            waiting[number].add(message)
            if number in unknown:
                unknown.remove(number)
                heapq.heappush(heads, (_written(message), number))
        unknown = {number for number in unknown if not scan.is_over(number)}
        while heads and not unknown:
            _, number = heapq.heappop(heads)
            yield waiting[number].take()
            following = waiting[number].first()
            if following is not None:
                heapq.heappush(heads, (_written(following), number))
            elif not scan.is_over(number):
                unknown.add(number)
        scan.hold({number for number, messages in waiting.items() if messages.bytes > AHEAD})


class _Waiting:
    """What was fetched of one partition and has not had its turn."""

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


def _written(message: Message) -> int:
    return message.timestamp()[1]
