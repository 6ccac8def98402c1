"""One life of the trainer in a run: alone in its group, fenced off from the lives before it.

It begins in this order, and each step is why the next is safe:

1. Wait until nobody is in the consumer group: a trainer that lives is not disturbed, a spare waits.
2. Take the run's transactional id. Whoever had it can commit nothing any more.
3. Read `policy` and `ledger`. Nobody else can add to them now.
4. Commit `started` with the next incarnation: gateways send nothing to engines of earlier ones.
5. Join the group, with the first poll.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from pool.connection import Connection
from pool.consumer import StatefulConsumer
from pool.ends import Ends
from pool.errors import Fatal
from pool.groups import GroupAssembler, GroupRules
from pool.ledger import Ledger
from pool.marks import PolicyMarks
from pool.membership import wait_until_empty
from pool.producer import Output
from pool.reader import read_records
from pool.topics import LEDGER, POLICY, STEPS
from schemas import Decision, Outcome, PolicyVersion, Record
from schemas.records import Phase
from trainer.deciding.waiting import Item

log = logging.getLogger(__name__)


class Incarnation:
    """`number` counts the lives of a run. All writing goes through one fenced producer, in the thread
    that polls the consumer."""

    def __init__(
        self,
        connection: Connection,
        run: str,
        group: str,
        topic: str,
        rules: GroupRules,
        max_waiting: int,
        probe: Callable[[str], None],
        accept_loss: bool = False,
    ) -> None:
        self.run = run
        self.group = group
        self.topic = topic
        """Of rewards, without its prefix."""
        self.topic_name = connection.topic_name
        self.codec = connection.codec()
        self._connection = connection
        self._rules = rules
        self.assemblers: dict[int, GroupAssembler] = {}
        self.consumer: StatefulConsumer[Item] = StatefulConsumer(
            connection,
            topic=topic,
            group=group,
            transactional_id=f"{connection.topic_prefix}trainer-{run}",
            assembler=self._assembler,
            codec=self.codec,
            max_waiting=max_waiting,
            accept_loss=accept_loss,
            probe=probe,
        )
        self.marks = PolicyMarks(run, _of_type(PolicyVersion, self._read(POLICY)))
        self.ledger = Ledger(run, self._read(LEDGER))
        self._check_topic()
        self.number = self.marks.incarnation + 1
        self._ends = Ends(connection, STEPS, topic)
        self.write(self._version(self.marks.opened or 0, "started"))

    def _check_topic(self) -> None:
        """Offsets of two topics in one ledger would mean nothing."""
        earlier = self.ledger.topic
        if earlier not in (None, self.topic):
            raise Fatal(
                f"run {self.run} has been trained from {earlier}, and this is {self.topic}; "
                "go on with those rewards, or give the run another name"
            )

    def _assembler(self, partition: int) -> GroupAssembler:
        self.assemblers[partition] = GroupAssembler(
            self._rules, self.ledger.decided(partition), self.ledger.others()
        )
        return self.assemblers[partition]

    def _read(self, topic: str) -> list[Record]:
        return asyncio.run(read_records(self._connection, topic, self.codec))

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

    def forget_before(self, version: int) -> None:
        """Keeps of the ledger what a rebuild, or training again from this version, would need."""
        unseen = [decision.sequence for decision in self.ledger.trained_after(version)]
        needed = self.ledger.needs()
        self.ledger.forget_before(
            min([*unseen, self.ledger.sequence, needed or self.ledger.sequence])
        )

    def live(self, version: int, outcomes: Iterable[Outcome] = ()) -> None:
        """Commits `live` together with what became of the training."""
        self.write(self._version(version, "live"), *outcomes)

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


def wait_until_alone(connection: Connection, group: str, is_stopped: Callable[[], bool]) -> None:
    wait_until_empty(
        connection,
        group,
        is_stopped,
        lambda: log.info("group %s has a trainer; waiting to take over when it leaves", group),
    )


def now_ms() -> int:
    return int(time.time() * 1000)


def _of_type(kind: type[PolicyVersion], records: Iterable[Record]) -> Iterator[PolicyVersion]:
    return (record for record in records if isinstance(record, kind))
