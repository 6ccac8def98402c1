"""A topic folded into memory and kept up to date.

A follower reads one topic from its first record and never stops; it passes every record to a
function, in the order of its partition. It answers two questions of processes that share a topic.
`sync`: have I seen everything that was written before now? `wait_until_seen`: have I seen everything
before this record, which I wrote myself? The second one usually costs nothing.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pool.connection import Connection
from pool.readers.reader import TopicReader, open_topic
from schemas import Codec, Position, Record, SchemaError
from servicekit.errors import BrokerUnavailable

log = logging.getLogger(__name__)

Apply = Callable[[Record], None]
POLL_MS = 100
"""How long the broker may hold a fetch request while there are no new records. A partition whose last
records were still unread when the request was sent has to wait for the next request."""
RETRY_AFTER = 1.0
"""Seconds until a topic that could not be read is opened again."""


class Follower:
    """`async with Follower(connection, topic, codec, apply) as follower`: on entry, all records of the
    topic are applied. Records that contain `own_mark` were written by this process, which has applied
    them already; they are not decoded."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        codec: Codec,
        apply: Apply,
        own_mark: bytes | None = None,
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._codec = codec
        self._apply = apply
        self._own_mark = own_mark
        self._reader: TopicReader | None = None
        self._reached: dict[int, int] = {}
        self._own: dict[int, set[int]] = defaultdict(set)
        self._has_moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._current_sync: asyncio.Task[None] | None = None
        self._next_sync: asyncio.Task[None] | None = None
        self._end_request: asyncio.Task[dict[int, int]] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow(), name=f"follow {self._topic}")
        try:
            await self.sync()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        started = (self._task, self._current_sync, self._next_sync, self._end_request)
        tasks = [task for task in started if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_failure(self) -> None:
        """Never returns: raises the error that ended the reading."""
        assert self._task is not None
        await asyncio.wait([self._task])
        self._raise_failure()

    async def sync(self) -> None:
        """Returns when all records that the topic has at this moment are applied. Callers that come
        while a request is under way share the next one, so a thousand callers cost two requests."""
        if self._next_sync is None:
            self._next_sync = asyncio.create_task(self._sync_after(self._current_sync))
        await asyncio.shield(self._next_sync)

    def note_own(self, own: Position) -> bool:
        """Notes that this process wrote the acknowledged record at this position. Returns whether
        everything before it has been seen."""
        self._own[own.partition].add(own.offset)
        return self._has_seen_before(own)

    async def wait_until_seen(self, own: Position) -> None:
        """Returns when every record before our own one at this position is applied, or is ours."""
        while not self.note_own(own):
            await self._wait_for_records()

    def _has_seen_before(self, own: Position) -> bool:
        reached = self._reached.get(own.partition, 0)
        ours = sum(reached <= offset < own.offset for offset in self._own[own.partition])
        return own.offset - reached <= ours

    async def _sync_after(self, earlier: "asyncio.Task[None] | None") -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._current_sync, self._next_sync = self._next_sync, None
        ends = await self._ends()
        while any(self._reached.get(number, 0) < end for number, end in ends.items()):
            await self._wait_for_records()

    async def _ends(self) -> dict[int, int]:
        """The topic's end offsets now. A reader that is closed meanwhile never answers, so the next
        reader is asked."""
        while True:
            while self._reader is None:
                await self._wait_for_records()
            self._end_request = asyncio.create_task(self._reader.ends(self._reader.partitions))
            await asyncio.wait([self._end_request])
            if not self._end_request.cancelled():
                return self._end_request.result()

    async def _wait_for_records(self) -> None:
        if self._task is None or self._task.done():
            self._raise_failure()
        self._has_moved.clear()
        await self._has_moved.wait()

    def _raise_failure(self) -> None:
        error = None if self._task is None or self._task.cancelled() else self._task.exception()
        raise error or BrokerUnavailable(f"{self._topic} is no longer followed")

    async def _follow(self) -> None:
        try:
            while True:
                try:
                    await self._read()
                except BrokerUnavailable as error:
                    log.warning(
                        "Following %s is interrupted and is retried: %s", self._topic, error
                    )
                    await asyncio.sleep(RETRY_AFTER)
        finally:
            self._has_moved.set()

    async def _read(self) -> None:
        async with open_topic(self._connection, self._topic, POLL_MS) as reader:
            bounds = await reader.bounds(reader.partitions)
            starts = {p: max(found.low, self._reached.get(p, 0)) for p, found in bounds.items()}
            self._reached |= starts
            self._reader = reader
            try:
                async for message in reader.read(starts, moved=self._move):
                    self._apply_value(message.value)
            finally:
                self._reader = None
                if self._end_request is not None:
                    self._end_request.cancel()

    def _apply_value(self, value: bytes | None) -> None:
        if self._own_mark is not None and value is not None and self._own_mark in value:
            return
        if value is None:
            return  # a tombstone: compaction has removed its record
        try:
            record = self._codec.decode(value)
        except SchemaError as error:
            log.warning("A record of %s cannot be read and is skipped: %s", self._topic, error)
            return
        self._apply(record)

    def _move(self, positions: dict[int, int]) -> None:
        self._reached |= positions
        for partition, reached in positions.items():
            if self._own[partition]:
                self._own[partition] = {o for o in self._own[partition] if o >= reached}
        self._has_moved.set()
