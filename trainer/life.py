"""One life of a trainer in a run: what it knows of the run, and what it writes about it."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from pool.connection import Connection
from pool.consumers.consumer import FinishedWork, Outputs
from pool.core.groups import GroupAssembler
from pool.core.ledger import Ledger
from pool.core.marks import PolicyMarks
from pool.core.progress import Progress, WorkItem
from pool.producers.output import Output
from pool.readers.end_offsets import EndOffsets
from pool.readers.reader import read_records
from pool.topics import LEDGER, POLICY, STEPS
from schemas import Decision, Outcome, PolicyVersion, Record, SkippedRange
from schemas.records import Phase
from servicekit.errors import Fatal
from trainer.deciding.waiting import Item


class Source(Protocol):
    """Where closed groups come from, and the right to write: a member of a consumer group, or a reader
    of a fixed range."""

    lost: list[SkippedRange]

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def poll(self, timeout: float) -> list[WorkItem[Item]]: ...

    def finish(
        self,
        works: Sequence[WorkItem[Item]],
        outputs: Outputs,
        assignments: Sequence[Progress[Item]] = (),
    ) -> FinishedWork[Item]: ...

    def commit(self) -> bool: ...

    def write(self, outputs: Sequence[Output]) -> None: ...

    def assignment(self, partition: int) -> Progress[Item] | None: ...

    def position(self, partition: int) -> int | None: ...

    def lags(self) -> dict[int, int]: ...


class Life:
    """`number` counts the lives of a run. Whoever makes one has fenced the earlier ones off, so nobody
    else adds to the policy and the ledger of the run any more."""

    consumer: Source

    def __init__(self, connection: Connection, run: str, topic: str) -> None:
        self.run = run
        self.topic = topic
        """Of rewards, without its prefix."""
        self.topic_name = connection.topic_name
        self.codec = connection.codec()
        self.assemblers: dict[int, GroupAssembler] = {}
        self._connection = connection
        self.marks = PolicyMarks(run, _of_type(PolicyVersion, self._read(POLICY)))
        self.ledger = Ledger(run, self._read(LEDGER))
        self._check_topic()
        self.number = self.marks.incarnation + 1
        self._ends = EndOffsets(connection, STEPS, topic)

    def _check_topic(self) -> None:
        """Offsets of two topics in one ledger would mean nothing."""
        earlier = self.ledger.topic
        if earlier not in (None, self.topic):
            raise Fatal(
                f"run {self.run} has been trained from {earlier}, and this is {self.topic}; "
                "go on with those rewards, or give the run another name"
            )

    def _read(self, topic: str) -> list[Record]:
        return asyncio.run(read_records(self._connection, topic, self.codec))

    def started(self) -> PolicyVersion:
        """The first word of a life."""
        return self._version(self.marks.opened or 0, "started")

    def write(self, *records: PolicyVersion | Outcome | Decision) -> None:
        """Commits records of ours together, and takes them in."""
        self.consumer.write([self.output(record) for record in records])
        for record in records:
            if isinstance(record, PolicyVersion):
                self.marks.add(record)
            else:
                self.ledger.add(record)

    def output(self, record: PolicyVersion | Outcome | Decision) -> Output:
        topic = self._connection.topic_name(POLICY if isinstance(record, PolicyVersion) else LEDGER)
        return Output(topic, self.run, self.codec.encode(record, topic))

    def open(self, version: int) -> None:
        """Samples the marks and commits `opened`. No engine may hold the version before."""
        if self.marks.opened is None:
            # What the run's agents got from the weights that everything starts with is version 0's.
            self.write(self._version(version, "opened"))
        else:
            ends = self._ends.sample()
            self.write(self._version(version, "opened", ends[STEPS], ends[self.topic]))

    def live(self, version: int, outcomes: Iterable[Outcome] = ()) -> None:
        """Commits `live` together with what became of the training."""
        self.write(self._version(version, "live"), *outcomes)

    def forget_before(self, version: int) -> None:
        """Keeps of the ledger what a rebuild, or training again from this version, would need."""
        unseen = [decision.sequence for decision in self.ledger.trained_after(version)]
        needed = self.ledger.oldest_needed()
        self.ledger.forget_before(
            min([*unseen, self.ledger.sequence, needed or self.ledger.sequence])
        )

    def _version(
        self, version: int, phase: Phase, steps: Iterable[int] = (), rewarded: Iterable[int] = ()
    ) -> PolicyVersion:
        return PolicyVersion(
            run=self.run,
            incarnation=self.number,
            version=version,
            phase=phase,
            steps_marks=list(steps),
            rewarded_marks=list(rewarded),
            created_at=now_ms(),
            topic=self.topic,
        )


def now_ms() -> int:
    return int(time.time() * 1000)


def _of_type(kind: type[PolicyVersion], records: Iterable[Record]) -> Iterator[PolicyVersion]:
    return (record for record in records if isinstance(record, kind))
