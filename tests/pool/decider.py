"""A trainer that does not train: assembles groups from `rewarded` and writes Decisions."""

import time
from collections.abc import Callable, Sequence

from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group, GroupRules, Judgement, UngroupedTrajectory, judge_member
from pool.core.ledger import Ledger
from pool.core.marks import PolicyMarks
from pool.core.progress import WorkItem
from pool.core.trajectories import StrayRecord, Trajectory
from pool.producers.output import Output
from pool.topics import LEDGER, REWARDED
from schemas import DecidedGroup, Decision, Member, PartitionOffsets

Item = Group | UngroupedTrajectory | StrayRecord


class Decider:
    """Decides every closed group at once, one Decision per poll. Use it in a `with`."""

    def __init__(
        self,
        connection: Connection,
        ledger: Ledger,
        marks: PolicyMarks,
        rules: GroupRules,
        max_age: int,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._marks = marks
        self._rules = rules
        self._max_age = max_age
        self._assemblers: dict[int, GroupAssembler] = {}
        self._waiting: list[WorkItem[Item]] = []
        self._codec = connection.codec()
        self.consumer: StatefulConsumer[Item] = StatefulConsumer(
            connection,
            topic=REWARDED,
            group="decider",
            transactional_id=f"decider-{connection.topic_prefix}",
            assembler=self._assembler,
            codec=self._codec,
            probe=probe,
        )

    def _assembler(self, partition: int) -> GroupAssembler:
        self._assemblers[partition] = GroupAssembler(
            self._rules, self._ledger.decided_groups(partition), self._ledger.decided_others()
        )
        return self._assemblers[partition]

    def turn(self) -> None:
        """Reads once; decides what is there."""
        works = [*self._waiting, *self.consumer.poll()]
        self._waiting = []
        if not works:
            self.consumer.commit()
            return
        written = self._decide(works)
        while not self.consumer.commit():
            # Refused for now. It is the only member of its group, so nothing becomes void.
            self._waiting += self.consumer.poll()
        self._settle(works, written[0])

    def _decide(self, works: Sequence[WorkItem[Item]]) -> list[Decision]:
        """Hands a Decision on the works to the consumer; the list holds it once it is written."""
        groups = [self._judge(w.item) for w in works if isinstance(w.item, Group)]
        others = [w.item.member() for w in works if isinstance(w.item, UngroupedTrajectory)]
        written: list[Decision] = []

        def outputs(offsets: Sequence[PartitionOffsets]) -> list[Output]:
            written[:] = [self._decision(groups, others, offsets)]
            value = self._codec.encode(written[0])
            return [Output(self._connection.topic_name(LEDGER), "run", value)]

        self.consumer.finish(works, outputs)
        return written

    def _settle(self, works: Sequence[WorkItem[Item]], decision: Decision) -> None:
        self._ledger.add(decision)
        committed = {at.partition: at.committed for at in decision.offsets}
        for work in works:
            if isinstance(work.item, Group):
                partition = work.assignment.partition
                self._assemblers[partition].decide(work.item, committed[partition])

    def _decision(
        self,
        groups: list[DecidedGroup],
        others: list[Member],
        offsets: Sequence[PartitionOffsets],
    ) -> Decision:
        return Decision(
            run=self._ledger.run,
            incarnation=1,
            sequence=self._ledger.sequence + 1,
            version=self._ledger.sequence + 1,
            groups=groups,
            others=others,
            offsets=list(offsets),
            created_at=int(time.time() * 1000),
        )

    def _judge(self, group: Group) -> DecidedGroup:
        return group.judge(self._rules, self._member)

    def _member(self, group: Group, member: Trajectory) -> Judgement:
        judgement = judge_member(group, member)
        if judgement.verdict != "train":
            return judgement
        newest = self._marks.opened or 0
        return self._marks.judge(member, newest, self._max_age, frozenset())
