"""A topic folded into memory, and kept up to date.

A follower reads one topic from its first record and goes on for ever; every record is given to a
function, in the order of its partition. Processes that share the topic ask it two questions. `sync`:
have I seen everything that was written before now? `wait_until_seen`: have I seen everything that lies
before this record, which I wrote myself? The second one mostly costs nothing.
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
"""How long the broker may keep a request for records that it does not have. A partition whose last
records were still unread when the request left is asked for with the next one only."""
RETRY_AFTER = 1.0
"""Seconds until a topic is opened again that could not be read."""


class Follower:
    """`async with Follower(connection, topic, codec, apply) as follower`: on entry, everything that
    the topic held is applied. Records with `own_mark` in them are our own: we know them, and need not
    decode them."""

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
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[dict[int, int]] | None = None

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
        started = (self._task, self._syncing, self._waiting, self._asking)
        tasks = [task for task in started if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_failure(self) -> None:
        """Never returns: raises what made following impossible."""
        assert self._task is not None
        await asyncio.wait([self._task])
        self._raise_failure()

    async def sync(self) -> None:
        """Returns when all that was in the topic at this moment is applied. Whoever asks while an
        answer is on its way shares the next one, so a thousand callers cost two requests."""
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._sync_after(self._syncing))
        await asyncio.shield(self._waiting)

    def note_own(self, own: Position) -> bool:
        """We wrote the record at this place; to be said when it is acknowledged. True: all that lies
        before it has been seen."""
        self._own[own.partition].add(own.offset)
        return self._saw_all_before(own)

    async def wait_until_seen(self, own: Position) -> None:
        """Returns when all that lies before a record of our own is applied, or our own as well."""
        while not self.note_own(own):
            await self._next_move()

    def _saw_all_before(self, own: Position) -> bool:
        reached = self._reached.get(own.partition, 0)
        ours = sum(reached <= offset < own.offset for offset in self._own[own.partition])
        return own.offset - reached <= ours

    async def _sync_after(self, earlier: "asyncio.Task[None] | None") -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._syncing, self._waiting = self._waiting, None
        ends = await self._ends()
        while any(self._reached.get(number, 0) < end for number, end in ends.items()):
            await self._next_move()

    async def _ends(self) -> dict[int, int]:
        """The topic's ends now. A reader that is closed meanwhile would not answer: ask the next."""
        while True:
            while self._reader is None:
                await self._next_move()
            self._asking = asyncio.create_task(self._reader.ends(self._reader.partitions))
            await asyncio.wait([self._asking])
            if not self._asking.cancelled():
                return self._asking.result()

    async def _next_move(self) -> None:
        if self._task is None or self._task.done():
            self._raise_failure()
        self._moved.clear()
        await self._moved.wait()

    def _raise_failure(self) -> None:
        error = None if self._task is None or self._task.cancelled() else self._task.exception()
        raise error or BrokerUnavailable(f"nobody follows {self._topic} any more")

    async def _follow(self) -> None:
        try:
            while True:
                try:
                    await self._read()
                except BrokerUnavailable as error:
                    log.warning("following %s is interrupted: %s", self._topic, error)
                    await asyncio.sleep(RETRY_AFTER)
        finally:
            self._moved.set()

    async def _read(self) -> None:
        async with open_topic(self._connection, self._topic, POLL_MS) as reader:
            bounds = await reader.bounds(reader.partitions)
            starts = {p: max(found.low, self._reached.get(p, 0)) for p, found in bounds.items()}
            self._reached |= starts
            self._reader = reader
            try:
                async for message in reader.read(starts, moved=self._move):
                    self._take(message.value)
            finally:
                self._reader = None
                if self._asking is not None:
                    self._asking.cancel()

    def _take(self, value: bytes | None) -> None:
        if self._own_mark is not None and value is not None and self._own_mark in value:
            return
        if value is None:
            return  # a tombstone: compaction has taken what it stands for
        try:
            record = self._codec.decode(value)
        except SchemaError as error:
            log.warning("a record of %s cannot be read: %s", self._topic, error)
            return
        self._apply(record)

    def _move(self, positions: dict[int, int]) -> None:
        self._reached |= positions
        for partition, reached in positions.items():
            if self._own[partition]:
                self._own[partition] = {o for o in self._own[partition] if o >= reached}
        self._moved.set()
