"""The gateway's access to the log: durable writes, and reading trajectories back.

While the broker does not acknowledge records, `check` refuses new calls at once: generating what cannot
be recorded would be a waste, and an answer that is not in the log is never delivered.
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

STALLED_AFTER_S = 3.0
"""Age of the oldest unacknowledged record at which new calls are refused."""
SILENT_AFTER_S = 5.0
"""Time without any response of the broker after which new calls are refused, so that an idle gateway,
too, notices that it could not record."""
SAMPLE_EVERY_S = 1.0
LINGER_MS = 1
"""Short, because a client waits for each record; not 0, because a produce request for every single
record took 70 microseconds of CPU."""
READ_TIMEOUT_S = 10.0
"""Seconds without a record after which a read fails."""


class StepsLog:
    """Writes to `steps` and `trajectories`; reads `steps`. Opened by `open_log`."""

    def __init__(self, producer: Producer, reader: TopicReader, codec: Codec) -> None:
        self._producer = producer
        self._reader = reader
        self._codec = codec
        self._ends: dict[int, int] = {}
        self._pending: dict[int, float] = {}
        self._tickets = 0
        self._loop = asyncio.get_running_loop()
        self._last_response = self._loop.time()
        self._failed = asyncio.Event()

    def check(self) -> None:
        """Refuses a call whose Step could not be written now."""
        if self.is_stalled():
            raise Unavailable(
                "Kafka is not acknowledging records at the moment. Retry the request.",
                wait_s=self._outage_s(),
            )

    def is_stalled(self) -> bool:
        now = self._loop.time()
        oldest = next(iter(self._pending.values()), now)
        return now - oldest > STALLED_AFTER_S or now - self._last_response > SILENT_AFTER_S

    def _outage_s(self) -> float:
        """How long the broker has not responded. It is expected to take as long again."""
        now = self._loop.time()
        return now - min(self._last_response, *self._pending.values(), now)

    async def write(self, record: StepsRecord) -> Position:
        """Appends to `steps`; returns the record's position once Kafka has acknowledged it."""
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
        """Appends to `trajectories`; returns once Kafka has acknowledged it."""
        return await self._send(TRAJECTORIES, registration.trajectory_uid, registration)

    async def _send(
        self, topic: str, key: str, record: StepsRecord | Registration, headers: Headers = ()
    ) -> Position:
        self._tickets = ticket = self._tickets + 1
        self._pending[ticket] = began = self._loop.time()
        try:
            position = await self._producer.send(topic, key, record, headers)
        except BrokerUnavailable as error:
            metrics.publish_failures.labels("unavailable").inc()
            raise Unavailable(
                f"The record was not acknowledged by Kafka: {error}. Retry the request.",
                wait_s=self._outage_s(),
            ) from error
        except Fatal:
            metrics.publish_failures.labels("fatal").inc()
            self._failed.set()
            raise
        except RecordTooLarge as error:
            metrics.publish_failures.labels("too_large").inc()
            raise TooLarge(f"The record is too large for Kafka: {error}") from error
        finally:
            del self._pending[ticket]
        self._last_response = self._loop.time()
        metrics.publish_ack_seconds.observe(self._last_response - began)
        return position

    async def wait_for_failure(self) -> None:
        """Waits until the producer fails for good, then raises: the process must be restarted."""
        await self._failed.wait()
        raise Fatal(
            "The Kafka producer failed permanently. Restart the gateway; the cause is logged above."
        )

    def end_before(self, prompt_uid: str) -> Position:
        """A position in `steps` before all future records of this prompt. It may be up to a second
        old: that costs a recovery a few more records and saves a request to the broker here."""
        partition = self._reader.partition_of(prompt_uid)
        return Position(partition=partition, offset=self._ends[partition])

    async def sample_ends(self) -> None:
        """Updates the end offsets of `steps`."""
        for partition, end in (await self._reader.ends(self._reader.partitions)).items():
            self._ends[partition] = max(self._ends.get(partition, 0), end)
        self._last_response = self._loop.time()

    async def sample_forever(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            # Without a broker, the older sample is still correct.
            with suppress(BrokerUnavailable):
                await self.sample_ends()

    async def records_of(self, starts: Mapping[str, Position]) -> dict[str, list[StepsRecord]]:
        """The records of these trajectories in `steps`, each from its start position. All of them
        lie in one partition, so that one pass serves many."""
        records: dict[str, list[StepsRecord]] = {uid: [] for uid in starts}
        partition = next(iter(starts.values())).partition
        try:
            async with asyncio.timeout(READ_TIMEOUT_S) as timeout:
                async for record in self._records(partition, min(starts.values()).offset):
                    timeout.reschedule(self._loop.time() + READ_TIMEOUT_S)
                    if record.trajectory_uid in records:
                        records[record.trajectory_uid].append(record)
        except TimeoutError:
            raise Unavailable(
                f"Kafka sent no records for {READ_TIMEOUT_S:g} s while the trajectory was read back. "
                "Retry the request.",
                wait_s=READ_TIMEOUT_S,
            ) from None
        return records

    async def _records(self, partition: int, start: int) -> AsyncIterator[StepsRecord]:
        bounds = (await self._reader.bounds([partition]))[partition]
        first = max(bounds.low, start)
        async for message in self._reader.read({partition: first}, {partition: bounds.end}):
            try:
                record = self._codec.decode(message.value)
            except SchemaError:
                continue  # the topic's consumers dead-letter it
            if isinstance(record, StepsRecord):
                yield record


@asynccontextmanager
async def open_log(connection: Connection, codec: Codec) -> AsyncIterator[StepsLog]:
    """Run its `sample_forever` as a task."""
    async with (
        open_topic(connection, STEPS) as reader,
        Producer(connection, codec, linger_ms=LINGER_MS) as producer,
    ):
        log = StepsLog(producer, reader, codec)
        await log.sample_ends()
        yield log
