"""One Kafka transaction at a time: outputs and offsets together, or neither.

Every attempt ends in one of three ways, and the caller always knows which:

* it is committed;
* it is not, and the same outputs may go into the next one (`Aborted`);
* another process owns the transactional id, and this one must stop (`Fenced`).

When the result is not known (a time-out while committing, or a call that does not return), a new
producer is created under the same id. This ends the old transaction one way or the other, and the
group's offsets tell which way, since they are part of it. Continuing with the old producer could
finish a later transaction by mistake (KAFKA-17754).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Producer as ConfluentProducer

from pool.client_errors import ClientErrors
from pool.connection import Connection
from pool.core.bookmark import add_mark
from pool.producers.output import Output, producer_options
from servicekit.errors import BrokerUnavailable, Fenced, Retryable

log = logging.getLogger(__name__)

TRANSACTION_TIMEOUT = 10.0
"""Seconds for which the open transaction of a killed process blocks every reader."""
CALL_TIMEOUT = 5.0
RETRY_AFTER = 0.1
"""Seconds between two requests for a partition's first offset."""


class Aborted(Retryable):
    """The transaction did not take place."""


class _Unknown(Exception):
    """It is not known whether the transaction took place."""


class Transactions:
    """The transactional producer of one consumer."""

    def __init__(
        self,
        connection: Connection,
        group: str,
        transactional_id: str,
        patience: float,
        probe: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._group = group
        self._id = transactional_id
        self._patience = patience
        self._probe = probe
        self._producer = self._new_producer()

    def commit(
        self,
        membership: object,
        outputs: Iterable[Output],
        offsets: Sequence[TopicPartition],
    ) -> None:
        """Raises `Aborted` or `Fenced` when the transaction did not take place."""
        ours = [
            TopicPartition(at.topic, at.partition, at.offset, add_mark(at.metadata))
            for at in offsets
        ]
        try:
            self._run_transaction(membership, outputs, ours)
        except _Unknown as doubt:
            log.warning(
                "It is not known whether a transaction of %s took place: %s", self._id, doubt
            )
            self._producer = self._new_producer()
            if not self._is_committed(ours):
                raise Aborted(f"the broker did not finish the transaction: {doubt}") from doubt

    def write(self, outputs: Sequence[Output]) -> None:
        """Commits outputs without offsets. When it is not known whether they were written, they are
        written again, so readers must fold equal copies."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self._run_transaction(None, outputs, ())
                return
            except (Aborted, _Unknown) as failure:
                log.warning("A transaction of %s is repeated: %s", self._id, failure)
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"{self._connection.bootstrap} committed nothing for {self._patience:g} s: "
                        f"{failure}"
                    ) from failure
                self._producer = self._new_producer()

    def abandon(self) -> None:
        """Aborts an open transaction, so that it does not block readers until it times out."""
        with suppress(KafkaException):
            self._producer.abort_transaction(CALL_TIMEOUT)

    def _run_transaction(
        self, membership: object, outputs: Iterable[Output], offsets: Sequence[TopicPartition]
    ) -> None:
        self._call(self._producer.begin_transaction)
        try:
            for output in outputs:
                self._produce(output)
            self._probe("produced")
            if offsets:
                send = self._producer.send_offsets_to_transaction
                self._call(send, list(offsets), membership, CALL_TIMEOUT)
            self._probe("offsets sent")
            self._call(self._producer.commit_transaction, CALL_TIMEOUT)
        except Aborted:
            self._call(self._producer.abort_transaction, CALL_TIMEOUT)
            raise

    def _produce(self, output: Output) -> None:
        while True:
            try:
                self._producer.produce(
                    output.topic, output.value, output.key, headers=list(output.headers)
                )
                return
            except BufferError:
                self._producer.poll(0.1)
            except KafkaException as error:
                raise Aborted(f"{output.topic} refused a record: {error.args[0].str()}") from error

    def _call(self, step: Callable[..., None], *arguments: object) -> None:
        """Runs one step of a transaction; repeats it while the broker's error is retriable."""
        deadline = time.monotonic() + TRANSACTION_TIMEOUT
        while True:
            try:
                return _call_with_deadline(TRANSACTION_TIMEOUT, step, *arguments)
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                if error.fatal():
                    raise Fenced(
                        f"Another process took over transactional id {self._id}, or its transaction "
                        f"timed out: {error.str()}"
                    ) from failure
                if error.txn_requires_abort():
                    raise Aborted(error.str()) from failure
                if not error.retriable() or time.monotonic() > deadline:
                    raise _Unknown(error.str()) from failure

    def _new_producer(self) -> ConfluentProducer:
        """A new producer under our id; what its predecessor left open is ended before this returns."""
        deadline = time.monotonic() + self._patience
        while True:
            client_errors = ClientErrors(self._connection)
            producer = ConfluentProducer(
                producer_options(
                    self._connection,
                    error_cb=client_errors.record,
                    transactional_id=self._id,
                    transaction_timeout_ms=int(TRANSACTION_TIMEOUT * 1000),
                    # The next transaction may begin before the last one's markers are written. The
                    # broker then asks for a retry, and the default of 100 ms would be most of our time.
                    retry_backoff_ms=5,
                )
            )
            try:
                producer.init_transactions(CALL_TIMEOUT)
                return producer
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                if error.fatal():
                    raise Fenced(
                        f"Another process took over transactional id {self._id}: {error.str()}"
                    ) from failure
                producer.poll(0)
                if client_errors.access_refusal() or time.monotonic() > deadline:
                    raise client_errors.explain(
                        f"no broker at {self._connection.bootstrap} opened transactions for "
                        f"{self._patience:g} s",
                        error,
                    ) from failure

    def _is_committed(self, offsets: Sequence[TopicPartition]) -> bool:
        # With a client of its own, since the consumer that reads may be closing and not answer.
        client = Consumer(self._connection.confluent(group_id=self._group))
        partitions = [TopicPartition(ours.topic, ours.partition) for ours in offsets]
        committed = {at.partition: at for at in read_offsets(client, partitions, self._patience)}
        client.close()
        return all(
            (committed[ours.partition].offset, committed[ours.partition].metadata)
            == (ours.offset, ours.metadata)
            for ours in offsets
        )


def _call_with_deadline(seconds: float, step: Callable[..., None], *arguments: object) -> None:
    """Runs a client call under a deadline of our own, in a thread. With some lost group coordinators
    librdkafka never returns in spite of its time-out (issues 5456 and 5511); then the thread is
    abandoned."""
    answers: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            step(*arguments)
            answers.put(None)
        except BaseException as error:
            answers.put(error)

    Thread(target=run, name="transaction", daemon=True).start()
    try:
        error = answers.get(timeout=seconds)
    except Empty:
        raise _Unknown(f"the client did not return for {seconds:g} s") from None
    if error is not None:
        raise error


def read_offsets(
    consumer: Consumer, partitions: Sequence[TopicPartition], patience: float
) -> list[TopicPartition]:
    """The group's committed offsets, once no transaction on them is open."""
    deadline = time.monotonic() + patience
    while True:
        try:
            commits: list[TopicPartition] = consumer.committed(
                list(partitions), timeout=CALL_TIMEOUT
            )
            errors = [commit.error for commit in commits if commit.error]
            if not errors:
                return commits
            error = errors[0]
        except KafkaException as failure:
            error = failure.args[0]
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"The group's offsets could not be read for {patience:g} s: {error.str()}"
            )


def read_first_offset(consumer: Consumer, partition: TopicPartition, patience: float) -> int:
    """The first offset that the log still holds of a partition. A broker that has just become its
    leader, or just lost it, refuses the first requests."""
    deadline = time.monotonic() + patience
    while True:
        try:
            low, _ = consumer.get_watermark_offsets(partition, timeout=CALL_TIMEOUT)
            return int(low)
        except KafkaException as failure:
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"The first offset of {partition.topic}[{partition.partition}] could not be read "
                    f"for {patience:g} s: {failure.args[0].str()}"
                ) from failure
        time.sleep(RETRY_AFTER)
