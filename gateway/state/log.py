"""The gateway's hand on the log: writes that are durable when they return, and what it reads back.

When the broker stops acknowledging, `check` refuses new calls at once: to generate what cannot be
recorded would be a waste, and an answer that is not in the log is never given.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from gateway import metrics
from gateway.errors import TooLarge, Unavailable
from pool.connection import Connection
from pool.producers.output import Headers
from pool.producers.producer import Producer
from pool.readers.reader import TopicReader, open_topic
from pool.topics import STEPS, TRAJECTORIES
from schemas import (
    Codec,
    Feedback,
    Position,
    Registration,
    SchemaError,
    Step,
    StepNote,
    TrajectoryEnd,
)
from servicekit import tracing
from servicekit.errors import BrokerUnavailable, Fatal, RecordTooLarge

StepsRecord = Step | TrajectoryEnd | Feedback | StepNote

STALLED_AFTER = 3.0
"""Seconds that a record waits for its acknowledgement until no new call is begun."""
SILENT_AFTER = 5.0
"""Seconds without any answer of the broker after which no new call is begun: an idle gateway, too,
must know that it could not record."""
SAMPLE_EVERY = 1.0
LINGER_MS = 1
"""A client waits for each record, so none waits long for others; but a request to the broker for each
took 70 microseconds of CPU."""
READ_LIMIT = 10.0
"""Seconds without a record after which reading is given up."""


class Log:
    """Made by `open_log`."""

    def __init__(self, producer: Producer, reader: TopicReader, codec: Codec) -> None:
        self._producer = producer
        self._reader = reader
        self._codec = codec
        self._ends: dict[int, int] = {}
        self._pending: dict[int, float] = {}
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._answered = self._loop.time()
        self._broken = asyncio.Event()

    def check(self) -> None:
        """Refuses a call whose Step could not be written now."""
        if self.stalled():
            raise Unavailable("Kafka does not acknowledge records at the moment; try again")

    def stalled(self) -> bool:
        now = self._loop.time()
        oldest = next(iter(self._pending.values()), now)
        return now - oldest > STALLED_AFTER or now - self._answered > SILENT_AFTER

    async def write(self, record: StepsRecord) -> Position:
        """Appends to `steps`; the record's place, once it is durable."""
        write = self._write_traced if tracing.is_enabled() else self._write
        position = await write(record)
        ends = self._ends
        ends[position.partition] = max(ends[position.partition], position.offset + 1)
        return position

    async def _write(self, record: StepsRecord, trace: str = "") -> Position:
        return await self._send(STEPS, record.prompt_uid, record, tracing.headers(trace))

    async def _write_traced(self, record: StepsRecord) -> Position:
        topic = self._reader.topic
        with tracing.span(
            f"send {topic}",
            "producer",
            system="kafka",
            messaging="send",
            messaging_type="send",
            topic=topic,
            record=type(record).__name__,
            trajectory_uid=record.trajectory_uid,
            prompt_uid=record.prompt_uid,
            step_id=getattr(record, "step_id", None),
            run=record.run,
        ) as span:
            position = await self._write(record, span.traceparent)
            span.set_attributes(partition=str(position.partition), offset=position.offset)
        return position

    async def register(self, registration: Registration) -> Position:
        """Appends to `trajectories`."""
        return await self._send(TRAJECTORIES, registration.trajectory_uid, registration)

    async def _send(
        self, topic: str, key: str, record: StepsRecord | Registration, headers: Headers = ()
    ) -> Position:
        self._count = ticket = self._count + 1
        self._pending[ticket] = began = self._loop.time()
        try:
            position = await self._producer.send(topic, key, record, headers)
        except BrokerUnavailable as error:
            metrics.publish_failures.labels("unavailable").inc()
            raise Unavailable(f"the record is not in the log: {error}") from error
        except Fatal:
            metrics.publish_failures.labels("fatal").inc()
            self._broken.set()
            raise
        except RecordTooLarge as error:
            metrics.publish_failures.labels("too_large").inc()
            raise TooLarge(f"the record is not in the log: {error}") from error
        finally:
            del self._pending[ticket]
        self._answered = self._loop.time()
        metrics.publish_ack_seconds.observe(self._answered - began)
        return position

    async def ended(self) -> None:
        """Raises when the producer cannot go on: the process must stop, and be started again."""
        await self._broken.wait()
        raise Fatal("the Kafka producer cannot go on; see the log above")

    def end_before(self, prompt_uid: str) -> Position:
        """A place in `steps` that no record of this prompt lies behind, unless it is there already.
        It may be a second old, which costs a recovery a few records and saves a request here."""
        partition = self._reader.partition_of(prompt_uid)
        return Position(partition=partition, offset=self._ends[partition])

    async def sample_ends(self) -> None:
        for partition, end in (await self._reader.ends(self._reader.partitions)).items():
            self._ends[partition] = max(self._ends.get(partition, 0), end)
        self._answered = self._loop.time()

    async def sample_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY)
            # Without a broker, the older sample is still right.
            with suppress(BrokerUnavailable):
                await self.sample_ends()

    async def records_of(self, starts: Mapping[str, Position]) -> dict[str, list[StepsRecord]]:
        """What `steps` holds of these trajectories, each from its place on. All of them lie in one
        partition, so that one pass serves many."""
        found: dict[str, list[StepsRecord]] = {uid: [] for uid in starts}
        partition = next(iter(starts.values())).partition
        try:
            async with asyncio.timeout(READ_LIMIT) as limit:
                async for record in self._records(partition, min(starts.values()).offset):
                    limit.reschedule(self._loop.time() + READ_LIMIT)
                    if record.trajectory_uid in found:
                        found[record.trajectory_uid].append(record)
        except TimeoutError:
            raise Unavailable("Kafka does not answer at the moment; try again") from None
        return found

    async def _records(self, partition: int, start: int) -> AsyncIterator[StepsRecord]:
        bounds = (await self._reader.bounds([partition]))[partition]
        first = max(bounds.low, start)
        async for message in self._reader.read({partition: first}, {partition: bounds.end}):
            try:
                record = self._codec.decode(message.value)
            except SchemaError:
                continue  # not ours; the readers of the topic see to it
            if isinstance(record, StepsRecord):
                yield record


@asynccontextmanager
async def open_log(connection: Connection, codec: Codec) -> AsyncIterator[Log]:
    """Run its `sample_for_ever` as a task."""
    async with (
        open_topic(connection, STEPS) as reader,
        Producer(connection, codec, linger_ms=LINGER_MS) as producer,
    ):
        log = Log(producer, reader, codec)
        await log.sample_ends()
        yield log
