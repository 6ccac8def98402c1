"""The stateful consumer: every record takes effect exactly once, whichever process crashes.

    consumer = StatefulConsumer(connection, …)
    while running:
        for work in consumer.poll():          # items that the new records completed
            consumer.finish([work], outputs)  # at once, or later from any thread
        consumer.commit()                     # outputs and offsets, one transaction

The rules, and where they live:

1. The committed offset is the next record to process; the commit's metadata says how to rebuild the
   state (`pool.core.bookmark`), and `pool.core.progress` rebuilds it.
2. Outputs and offsets are one transaction (`pool.consumers.transaction`).
3. `poll`, the rebalance callbacks and `commit` run in one thread, the owner's. A work item carries
   the assignment in which it was read; items of an earlier assignment are dropped. This matters: a
   broker does not stop a live member from committing a partition that it has lost.
4. For the same reason a commit presents the membership under which its partitions were assigned.
   When the client has a newer one, because the group changed or this process was expelled while it
   was suspended, all pending rebalance callbacks run before the new membership is presented.
5. After every rebalance the next commit takes place even if nothing is new. A process that was fenced
   while it was suspended, and has rejoined, learns of it this way and does not hold partitions until
   their next record.
6. A record that cannot be decoded goes to dead-letters in the same transaction, unless another
   group does that.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from pool.connection import MAX_MESSAGE_BYTES, Connection
from pool.consumers.partition import AssignedPartition, offsets_of, saved_at
from pool.consumers.transaction import Aborted, Transactions, read_first_offset, read_offsets
from pool.core.bookmark import MAX_TEXT
from pool.core.progress import Assembler, ItemT, Progress, WorkItem
from pool.producers.output import Output
from pool.topics import DEAD_LETTERS
from schemas import Codec, PartitionOffsets, SkippedRange
from servicekit.errors import Fatal, OffsetLost

log = logging.getLogger(__name__)

BATCH = 500
"""Most records that one poll reads."""
REBALANCE_POLL_S = 0.05
"""Seconds to wait for pending rebalance callbacks before a new membership is presented."""
WATERMARK_TIMEOUT_S = 1.0
"""Seconds to wait for watermarks; only metrics and admission need them."""
MAX_OUTPUTS = 5_000
"""About how many records one transaction writes: it must end long before it times out."""

Outputs = Sequence[Output] | Callable[[Sequence[PartitionOffsets]], Sequence[Output]]


@dataclass(slots=True)
class FinishedWork(Generic[ItemT]):
    """Work items whose outputs are committed together or not at all."""

    works: Sequence[WorkItem[ItemT]]
    outputs: Outputs
    assignments: Sequence[Progress[ItemT]]
    state: Literal["waiting", "committed", "void"] = "waiting"
    """`void`: the outputs depended on an assignment that was lost."""


def consumer_options(connection: Connection, group: str) -> dict[str, Any]:
    """The client options that all consumers of this project share."""
    classic: dict[str, Any] = {
        "partition_assignment_strategy": "cooperative-sticky",
        "session_timeout_ms": 6000,
        "heartbeat_interval_ms": 1000,
    }
    return connection.confluent(
        group_id=group,
        group_protocol=connection.group_protocol,
        enable_auto_commit=False,
        # A group whose committed offset is gone must fail, not continue elsewhere.
        auto_offset_reset="error",
        isolation_level="read_committed",
        fetch_max_bytes=2 * MAX_MESSAGE_BYTES,
        max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
        queued_max_messages_kbytes=64 * 1024,
        # Fetching pauses at that limit; with the default of a second the queue would run empty.
        fetch_queue_backoff_ms=10,
        retry_backoff_ms=5,
        **(classic if connection.group_protocol == "classic" else {}),
    )


class StatefulConsumer(Generic[ItemT]):
    """A member of a consumer group that holds state between records.

    * `assembler` creates the empty state of a partition.
    * `transactional_id` must belong to this process alone and be the same after a restart: a new id
      would leave the old transaction open until it times out.
    * `patience` is how many seconds a broker may be unavailable.
    * `accept_loss`: continue where retention has deleted records that open state needs, which is an
      error otherwise.
    * `ends` are offsets at which reading stops and past which nothing is committed.
    * Without `dead_letters`, records that cannot be decoded are skipped: another group writes them to
      dead-letters.
    * `probe` is called with the name of each stage; tests kill the process there.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        topic: str,
        group: str,
        transactional_id: str,
        assembler: Callable[[int], Assembler[ItemT]],
        codec: Codec,
        max_waiting: int = 2_000,
        patience: float = 120.0,
        accept_loss: bool = False,
        ends: Mapping[int, int] | None = None,
        dead_letters: bool = True,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.lost: list[SkippedRange] = []
        """Ranges whose open state `accept_loss` gave up; the owner takes them from here."""
        self._accept_loss = accept_loss
        self._ends = ends or {}
        self._dead_letters = dead_letters
        self._connection = connection
        self._topic = connection.topic_name(topic)
        self._group = group
        self._assembler = assembler
        self._codec = codec
        self._max_waiting = max_waiting
        self._patience = patience
        self._probe = probe
        self._partitions: dict[int, AssignedPartition[ItemT]] = {}
        self._finished: deque[FinishedWork[ItemT]] = deque()
        self._returned: list[WorkItem[ItemT]] = []
        """Work items to hand out again at the next poll."""
        self._transactions = Transactions(connection, group, transactional_id, patience, probe)
        self._consumer = Consumer(consumer_options(connection, group))
        self._membership: object = None
        self._is_proven = False
        """Whether a transaction was accepted since the last rebalance."""
        self._must_verify = False
        """A transaction was aborted: compare the group's offsets with ours before the next commit."""
        self._closing = False
        self._subscribed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._abandon()
        self.close()

    # Reading

    def poll(self, timeout: float = 0.1) -> list[WorkItem[ItemT]]:
        """Reads a batch and returns the items that it completed. The first call joins the group."""
        if not self._subscribed:
            self._subscribe()
        if self._partitions and self._membership != self._consumer.consumer_group_metadata():
            self._renew_membership()
        if self._must_verify:
            self._reload_lost_commits()
        self._pace()
        returned, self._returned = self._returned, []
        works = self._read(0 if returned else timeout)
        return returned + works

    def _subscribe(self) -> None:
        self._consumer.subscribe(
            [self._topic], on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose
        )
        self._subscribed = True

    def _read(self, timeout: float) -> list[WorkItem[ItemT]]:
        works: list[WorkItem[ItemT]] = []
        for message in self._consumer.consume(BATCH, timeout):
            works += self._receive(message)
        return works + self._advance()

    def _renew_membership(self) -> None:
        """Takes over the client's new membership, but only after the pending rebalance callbacks have
        run: a revocation is queued behind records that were fetched before it."""
        owned = [partition.topic_partition() for partition in self._partitions.values()]
        self._consumer.pause(owned)
        membership = self._consumer.consumer_group_metadata()
        # What it reads are records of a partition that was assigned just now.
        self._returned += self._read(REBALANCE_POLL_S)
        self._membership = membership
        for partition in self._partitions.values():
            partition.paused = False
        self._consumer.resume(
            [partition for partition in owned if partition.partition in self._partitions]
        )

    def _reload_lost_commits(self) -> None:
        """After an aborted transaction the group's offsets must be those of our commit before it. If
        they are not, a restarted broker has lost a commit that it had acknowledged, and its outputs:
        then the partition is loaded again from what the group has."""
        owned = [partition.topic_partition() for partition in self._partitions.values()]
        for commit in read_offsets(self._consumer, owned, self._patience) if owned else ():
            if self._differs_from_saved(commit):
                log.warning(
                    "The broker lost an acknowledged commit of %s[%d]; its work is repeated.",
                    self._topic,
                    commit.partition,
                )
                paused = self._partitions[commit.partition].paused
                start = self._load(commit)
                self._partitions[commit.partition].paused = paused  # as the client has it
                self._consumer.seek(TopicPartition(self._topic, commit.partition, start))
        self._must_verify = False

    def _receive(self, message: Message) -> list[WorkItem[ItemT]]:
        failure = message.error()
        if failure is not None:
            self._raise_or_log(failure)
            return []
        partition = self._partitions.get(message.partition() or 0)
        if partition is None:
            return []  # fetched before the partition was revoked
        if not partition.progress.live:
            self._probe("rebuilding")
        return partition.receive(message, self._codec)

    def _raise_or_log(self, error: KafkaError) -> None:
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise OffsetLost(
                f"Records of {self._topic} were deleted before they were read: {error}"
            )
        if error.fatal() or not error.retriable():
            raise Fatal(f"{self._topic} cannot be read: {error.str()}")
        log.warning("Reading %s failed and is retried: %s", self._topic, error.str())

    def _advance(self) -> list[WorkItem[ItemT]]:
        partitions = [partition.topic_partition() for partition in self._partitions.values()]
        return [
            work
            for position in (self._consumer.position(partitions) if partitions else ())
            for work in self._partitions[position.partition].advance(position.offset)
        ]

    def _pace(self) -> None:
        """Pauses partitions whose open work must not grow, and resumes the others. A partition that is
        being rebuilt is never paused: its work is handed out only when it is rebuilt, so pausing it
        would never make room."""
        crowded = sum(len(p.progress.open) for p in self._partitions.values()) >= self._max_waiting
        for partition in self._partitions.values():
            full = crowded or partition.is_full() or partition.is_over()
            full = full and partition.progress.live
            if full != partition.paused:
                partition.paused = full
                act = self._consumer.pause if full else self._consumer.resume
                act([partition.topic_partition()])

    # Finishing

    def finish(
        self,
        works: Sequence[WorkItem[ItemT]],
        outputs: Outputs,
        assignments: Sequence[Progress[ItemT]] = (),
    ) -> FinishedWork[ItemT]:
        """Marks work items as done, with their outputs; callable from any thread. All of it is
        committed in one transaction, or none. Outputs that contain the offsets of their own
        transaction, as a Decision does, are given as a function of those offsets. Outputs that depend
        on more than the works, such as on groups that a Decision closes itself, name the assignments
        under which they were made."""
        bundle = FinishedWork(works, outputs, assignments)
        self._finished.append(bundle)
        return bundle

    def assignment(self, partition: int) -> Progress[ItemT] | None:
        """The current assignment of a partition, if it is ours and its state is rebuilt."""
        state = self._partitions.get(partition)
        return state.progress if state is not None and state.progress.live else None

    def write(self, outputs: Sequence[Output]) -> None:
        """Commits outputs that belong to no work item, at once, in a transaction of their own. They may
        be written twice, so readers must fold equal copies."""
        self._transactions.write(outputs)

    def commit(self) -> bool:
        """Commits the finished work and the read positions. False: nothing was committed this time,
        and the next call tries again."""
        if self._must_verify or not self._partitions:
            return False
        bundles = self._take()
        done = [work for bundle in bundles for work in bundle.works]
        offsets = [p.commit(done) for p in self._partitions.values() if p.progress.live]
        outputs = self._outputs(bundles, offsets)
        is_proven = self._is_proven or not offsets
        if (
            is_proven
            and not outputs
            and not any(self._differs_from_saved(commit) for commit in offsets)
        ):
            return True
        if any(len(commit.metadata or "") > MAX_TEXT for commit in offsets):
            self._finished.extendleft(reversed(bundles))
            return False
        try:
            self._transactions.commit(self._membership, outputs, offsets)
        except Aborted as aborted:
            log.warning("A transaction of group %s was aborted: %s", self._group, aborted)
            self._finished.extendleft(reversed(bundles))
            self._must_verify = True
            return False
        self._is_proven = True
        self._settle(done, offsets)
        for bundle in bundles:
            bundle.state = "committed"
        return True

    def _differs_from_saved(self, commit: TopicPartition) -> bool:
        return saved_at(commit) != self._partitions[commit.partition].saved

    def _take(self) -> list[FinishedWork[ItemT]]:
        """Finished work that can be committed now. A bundle that depends on a lost assignment is void;
        its other work items are handed out again."""
        ready: list[FinishedWork[ItemT]] = []
        count = 0
        while self._finished and count < MAX_OUTPUTS:
            bundle = self._finished.popleft()
            needed = [*bundle.assignments, *(work.assignment for work in bundle.works)]
            if all(self._is_ours(assignment) for assignment in needed):
                ready.append(bundle)
                count += 1 if callable(bundle.outputs) else len(bundle.outputs)
            else:
                bundle.state = "void"
                self._returned += [work for work in bundle.works if self._is_ours(work.assignment)]
        return ready

    def _is_ours(self, assignment: Progress[ItemT]) -> bool:
        partition = self._partitions.get(assignment.partition)
        return partition is not None and partition.progress is assignment

    def _outputs(
        self, bundles: Iterable[FinishedWork[ItemT]], commits: Iterable[TopicPartition]
    ) -> list[Output]:
        offsets = [offsets_of(commit) for commit in commits]
        outputs: list[Output] = []
        for bundle in bundles:
            outputs += bundle.outputs(offsets) if callable(bundle.outputs) else bundle.outputs
        topic = self._connection.topic_name(DEAD_LETTERS)
        for partition in self._partitions.values() if self._dead_letters else ():
            for letter, reason in partition.dead_letters:
                headers = letter.headers_with(self._group, reason)
                outputs.append(Output(topic, letter.key, letter.value, headers))
        return outputs

    def _settle(self, done: Iterable[WorkItem[ItemT]], offsets: Iterable[TopicPartition]) -> None:
        for work in done:
            work.assignment.close([work])
        for commit in offsets:
            self._partitions[commit.partition].saved = saved_at(commit)
        for partition in self._partitions.values():
            partition.dead_letters.clear()

    def offsets(self) -> list[PartitionOffsets]:
        """The group's commits of our partitions: committed offset and rebuild offset."""
        return [
            offsets_of(TopicPartition(self._topic, number, *partition.saved))
            for number, partition in self._partitions.items()
        ]

    def bounds(self) -> dict[int, tuple[int, int]]:
        """The first offset of each of our partitions and the one after the last. The broker is asked,
        since a client does not learn of new records while a partition is paused; empty if the broker
        does not answer."""
        bounds: dict[int, tuple[int, int]] = {}
        for number, partition in self._partitions.items():
            try:
                low, end = self._consumer.get_watermark_offsets(
                    partition.topic_partition(), timeout=WATERMARK_TIMEOUT_S
                )
            except KafkaException as failure:
                log.warning(
                    "The offsets of %s[%d] are not known: %s",
                    self._topic,
                    number,
                    failure.args[0].str(),
                )
                return {}
            bounds[number] = low, end
        return bounds

    def lags(self) -> dict[int, int]:
        """How many records of each of our partitions the group has not processed."""
        return {
            number: end - max(low, self._partitions[number].saved[0])
            for number, (low, end) in self.bounds().items()
        }

    def position(self, partition: int) -> int | None:
        """The next offset to read, if the partition is ours and its state is rebuilt."""
        state = self._partitions.get(partition)
        return state.position if state is not None and state.progress.live else None

    def skip(
        self, partition: int, offset: int, done: Sequence[WorkItem[ItemT]] = ()
    ) -> SkippedRange | None:
        """Continues at `offset` without reading the records before it, and returns the skipped range.
        Only a partition without open state can skip, since open state still needs its verdicts. `done`
        are work items that the next commit finishes."""
        state = self._partitions.get(partition)
        if state is None or state.position >= offset:
            return None
        if not (state.progress.live and state.is_idle(done)):
            return None
        skipped = SkippedRange(partition=partition, first=state.position, end=offset)
        state.position = offset
        self._consumer.seek(TopicPartition(self._topic, partition, offset))
        return skipped

    # Rebalancing

    def _assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._closing:
            return  # we are leaving, and the partitions are reassigned at once
        ours = [TopicPartition(self._topic, partition.partition) for partition in partitions]
        commits = read_offsets(consumer, ours, self._patience) if ours else []
        starts = [
            TopicPartition(self._topic, commit.partition, self._load(commit)) for commit in commits
        ]
        consumer.incremental_assign(starts)
        self._membership = consumer.consumer_group_metadata()
        self._is_proven = False
        log.info("Assigned partitions %s", [partition.partition for partition in partitions])

    def _load(self, commit: TopicPartition) -> int:
        """Loads a partition from the group's commit and returns the offset to read from."""
        low = read_first_offset(self._consumer, commit, self._patience)
        assembler = self._assembler(commit.partition)
        partition = AssignedPartition.load(commit, low, assembler, self._accept_loss)
        if partition.progress.start.rebuild > offsets_of(commit).rebuild >= 0:
            lost = SkippedRange(
                partition=commit.partition,
                first=offsets_of(commit).rebuild,
                end=partition.progress.committed,
            )
            log.warning(
                "Retention deleted records of %s[%d] that open state needed; the state is given up.",
                self._topic,
                commit.partition,
            )
            self.lost.append(lost)
        partition.end = self._ends.get(commit.partition)
        self._partitions[commit.partition] = partition
        return partition.position

    def _revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Finished work may still be committed; the next owner repeats the rest."""
        self._probe("revoking")
        self.commit()
        self._forget(partitions)
        consumer.incremental_unassign(partitions)

    def _lose(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._forget(partitions)
        consumer.incremental_unassign(partitions)

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            self._partitions.pop(partition.partition, None)
        self._is_proven = False
        log.info("Gave up partitions %s", [partition.partition for partition in partitions])

    def _abandon(self) -> None:
        """After an error nothing more is committed; a restart reads the same records again."""
        self._partitions.clear()
        self._finished.clear()
        self._transactions.abandon()

    def close(self) -> None:
        """Commits the finished work and leaves the group, which reassigns its partitions at once."""
        self._closing = True
        self._consumer.close()
