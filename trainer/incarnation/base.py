"""One incarnation of the trainer in a run: the state it knows of the run, and the records it writes."""

import asyncio
import time
from collections.abc import Iterable

from pool.connection import Connection
from pool.core.group_assembler import GroupAssembler
from pool.core.ledger import Ledger
from pool.core.marks import PolicyMarks
from pool.producers.output import Output
from pool.readers.end_offsets import EndOffsets
from pool.readers.reader import read_records
from pool.topics import LEDGER, POLICY, STEPS
from schemas import Decision, Outcome, PolicyVersion, Record
from schemas.records import Phase
from servicekit.errors import Fatal
from trainer.incarnation.source import GroupSource


class Incarnation:
    """`number` counts the incarnations of a run. Creating one fences off all earlier ones, so that
    nothing else adds to the run's policy and ledger any more."""

    consumer: GroupSource

    def __init__(self, connection: Connection, run: str, topic: str) -> None:
        self.run = run
        self.topic = topic
        """The topic that groups are read from, without its prefix."""
        self.topic_name = connection.topic_name
        self.codec = connection.codec()
        self.assemblers: dict[int, GroupAssembler] = {}
        self._connection = connection
        versions = (r for r in self._read(POLICY) if isinstance(r, PolicyVersion))
        self.marks = PolicyMarks(run, versions)
        self.ledger = Ledger(run, self._read(LEDGER))
        self._check_topic()
        self.number = self.marks.incarnation + 1
        self._ends = EndOffsets(connection, STEPS, topic)

    def _check_topic(self) -> None:
        """Offsets of two topics cannot be mixed in one ledger."""
        earlier = self.ledger.topic
        if earlier not in (None, self.topic):
            raise Fatal(
                f"run {self.run} was trained from topic {earlier} so far, and this start reads "
                f"{self.topic}; continue with {earlier}, or choose another name with --run"
            )

    def _read(self, topic: str) -> list[Record]:
        return asyncio.run(read_records(self._connection, topic, self.codec))

    def started_record(self) -> PolicyVersion:
        """The first record that an incarnation writes."""
        return self._version_record(self.marks.opened or 0, "started")

    def write(self, *records: PolicyVersion | Outcome | Decision) -> None:
        """Commits the records in one transaction, then applies them to our own state."""
        self.consumer.write([self.output(record) for record in records])
        for record in records:
            if isinstance(record, PolicyVersion):
                self.marks.add(record)
            else:
                self.ledger.add(record)

    def output(self, record: PolicyVersion | Outcome | Decision) -> Output:
        topic = self._connection.topic_name(POLICY if isinstance(record, PolicyVersion) else LEDGER)
        return Output(topic, self.run, self.codec.encode(record, topic))

    def open_version(self, version: int) -> None:
        """Samples the marks and commits `opened`. No engine may hold the version before that."""
        if self.marks.opened is None:
            # Everything that agents sampled before the first start belongs to version 0, so its
            # marks are 0 and are not sampled.
            self.write(self._version_record(version, "opened"))
        else:
            ends = self._ends.sample()
            self.write(self._version_record(version, "opened", ends[STEPS], ends[self.topic]))

    def set_live(self, version: int, outcomes: Iterable[Outcome] = ()) -> None:
        """Commits `live` together with the Outcomes of the training."""
        self.write(self._version_record(version, "live"), *outcomes)

    def forget_before(self, version: int) -> None:
        """Drops from the ledger in memory what neither a rebuild nor training again from the
        checkpoint of this version would need."""
        unseen = [decision.sequence for decision in self.ledger.trained_after(version)]
        needed = self.ledger.oldest_needed()
        self.ledger.forget_before(
            min([*unseen, self.ledger.sequence, needed or self.ledger.sequence])
        )

    def _version_record(
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
