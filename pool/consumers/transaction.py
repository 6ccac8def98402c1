"""One Kafka transaction at a time: outputs and offsets together, or neither.

Every attempt ends in one of three ways, and the caller always knows which:

* it is committed;
* it is not, and the same outputs may go into the next one (`Aborted`);
* another process owns the transactional id, and this one must stop (`Fenced`).

When nobody says (a time-out while committing, or a call that does not return), the producer is made
anew under the same id, which ends the old transaction one way or the other, and the group's offsets
tell which way: they are part of it. Going on with the old producer could finish a later transaction
by mistake (KAFKA-17754).
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
from pool.producers.sender import Output, producer_options
from servicekit.errors import BrokerUnavailable, Fenced, Retryable

log = logging.getLogger(__name__)

TRANSACTION_TIMEOUT = 10.0
"""A killed process's open transaction blocks every reader for this long."""
CALL_TIMEOUT = 5.0


class Aborted(Retryable):
    """The transaction did not take place."""


class _InDoubt(Exception):
    """The broker did not say whether the transaction took place."""


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
        self._producer = self._begin_anew()

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
            self._attempt(membership, outputs, ours)
        except _InDoubt as doubt:
            log.warning("transaction of %s is in doubt: %s", self._id, doubt)
            self._producer = self._begin_anew()
            if not self._is_committed(ours):
                raise Aborted(f"the broker did not finish the transaction: {doubt}") from doubt

    def write(self, outputs: Sequence[Output]) -> None:
        """Outputs without offsets. When it is not known whether they were written, they are written
        again: readers must take a repeated copy for one."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self._attempt(None, outputs, ())
                return
            except (Aborted, _InDoubt) as failure:
                log.warning("transaction of %s is repeated: %s", self._id, failure)
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"{self._connection.bootstrap} committed nothing for {self._patience:g} s: "
                        f"{failure}"
                    ) from failure
                self._producer = self._begin_anew()

    def abandon(self) -> None:
        """Ends what is open, so that it does not block readers until it times out."""
        with suppress(KafkaException):
            self._producer.abort_transaction(CALL_TIMEOUT)

    def _attempt(
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
        """Runs one step of a transaction, again while the broker asks for patience."""
        deadline = time.monotonic() + TRANSACTION_TIMEOUT
        while True:
            try:
                return _within(TRANSACTION_TIMEOUT, step, *arguments)
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                if error.fatal():
                    raise Fenced(
                        f"transactional id {self._id} was taken over by another process, or its "
                        f"transaction outlived the broker's patience: {error.str()}"
                    ) from failure
                if error.txn_requires_abort():
                    raise Aborted(error.str()) from failure
                if not error.retriable() or time.monotonic() > deadline:
                    raise _InDoubt(error.str()) from failure

    def _begin_anew(self) -> ConfluentProducer:
        """A producer under our id; whatever its predecessor left open is ended before it returns."""
        deadline = time.monotonic() + self._patience
        while True:
            client_errors = ClientErrors(self._connection)
            producer = ConfluentProducer(
                producer_options(
                    self._connection,
                    error_cb=client_errors.record,
                    transactional_id=self._id,
                    transaction_timeout_ms=int(TRANSACTION_TIMEOUT * 1000),
                    # The next transaction may begin before the last one's markers are written; the
                    # broker then says "again", and waiting 100 ms for that would be most of our time.
                    retry_backoff_ms=5,
                )
            )
            try:
                producer.init_transactions(CALL_TIMEOUT)
                return producer
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                if error.fatal():
                    raise Fenced(f"transactional id {self._id}: {error.str()}") from failure
                producer.poll(0)
                if client_errors.access_refusal() or time.monotonic() > deadline:
                    raise client_errors.explain(
                        f"no broker at {self._connection.bootstrap} opened transactions for "
                        f"{self._patience:g} s",
                        error,
                    ) from failure

    def _is_committed(self, offsets: Sequence[TopicPartition]) -> bool:
        # A consumer of its own, since the one that reads may be closing and answers nothing then.
        reader = Consumer(self._connection.confluent(group_id=self._group))
        asked = [TopicPartition(at.topic, at.partition) for at in offsets]
        found = {at.partition: at for at in read_offsets(reader, asked, self._patience)}
        reader.close()
        return all(
            (found[at.partition].offset, found[at.partition].metadata) == (at.offset, at.metadata)
            for at in offsets
        )


def _within(seconds: float, step: Callable[..., None], *arguments: object) -> None:
    """Runs a call of the client, which may never return although it was given a time-out: librdkafka
    loses its group coordinator so (issues 5456 and 5511). The thread is left behind with it then."""
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
        raise _InDoubt(f"the client did not return for {seconds:g} s") from None
    if error is not None:
        raise error


def read_offsets(
    consumer: Consumer, partitions: Sequence[TopicPartition], patience: float
) -> list[TopicPartition]:
    """The group's committed offsets, once no transaction on them is open."""
    deadline = time.monotonic() + patience
    while True:
        try:
            found: list[TopicPartition] = consumer.committed(list(partitions), timeout=CALL_TIMEOUT)
            errors = [place.error for place in found if place.error]
            if not errors:
                return found
            error = errors[0]
        except KafkaException as failure:
            error = failure.args[0]
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"the group's offsets could not be read for {patience:g} s: {error.str()}"
            )
