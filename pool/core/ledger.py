"""The ledger: the trainer's write-ahead log, folded into what a restart needs.

A Decision is committed together with the offsets that it used up, before anything is trained. From
then on its batch is fixed: a restart trains the Decisions after its checkpoint again, from the same
records, and knows from the others which groups are closed for good.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pool.core.groups import DECIDED_MEMORY
from schemas import DecidedGroup, Decision, Member, Outcome, PartitionOffsets, Record
from servicekit.errors import Fatal


class GroupId(NamedTuple):
    partition: int
    prompt_uid: str
    first_offset: int


class TrainedTwice(Fatal):
    """A group stands in two Decisions with the verdict train."""


class Ledger:
    """One run's Decisions and Outcomes, in the order of the topic."""

    def __init__(self, run: str, records: Iterable[Record] = ()) -> None:
        self.run = run
        self.sequence = 0
        """Of the last Decision."""
        self.verdicts: Counter[str] = Counter()
        """Trajectories by verdict, over all Decisions."""
        self._decisions: dict[int, Decision] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._trained: dict[GroupId, int] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        if isinstance(record, Decision) and record.run == self.run:
            self._decide(record)
        elif isinstance(record, Outcome) and record.run == self.run:
            self._outcomes[record.sequence] = record

    def _decide(self, decision: Decision) -> None:
        if decision.sequence in self._decisions:
            return  # a repeated copy; the first by offset counts
        for group in decision.groups:
            if group.verdict == "train":
                self._train_once(group, decision.sequence)
        self._decisions[decision.sequence] = decision
        self.sequence = max(self.sequence, decision.sequence)
        self.verdicts.update(trajectory_verdicts(decision))

    def _train_once(self, group: DecidedGroup, sequence: int) -> None:
        earlier = self._trained.setdefault(group_id(group), sequence)
        if earlier != sequence:
            raise TrainedTwice(
                f"group {group.prompt_uid} at offset {group.first_offset} of partition "
                f"{group.partition} is trained by Decisions {earlier} and {sequence}"
            )

    @property
    def topic(self) -> str | None:
        """Where the records lie that its Decisions name."""
        return next((decision.topic for decision in self._decisions.values()), None)

    def decision(self, sequence: int) -> Decision | None:
        return self._decisions.get(sequence)

    def trained_after(self, version: int) -> list[Decision]:
        """The batches that a checkpoint of `version` has not seen, in order."""
        batches = (d for d in self._decisions.values() if d.version is not None)
        return [d for d in batches if d.version is not None and d.version > version]

    def outcome(self, sequence: int) -> Outcome | None:
        return self._outcomes.get(sequence)

    def lost_groups(self) -> set[GroupId]:
        """Groups that were to be trained and whose records are gone: a later Decision says so."""
        return {
            group_id(group)
            for decision in self._decisions.values()
            for group in decision.groups
            if group.verdict == "lost"
        }

    def forget_before(self, sequence: int) -> None:
        """Drops Decisions that nobody will ask for, so that a long run needs no more memory than a
        short one."""
        self._decisions = {n: d for n, d in self._decisions.items() if n >= sequence}
        self._outcomes = {n: o for n, o in self._outcomes.items() if n >= sequence}
        self._trained = {group: n for group, n in self._trained.items() if n >= sequence}

    def decided_groups(self, partition: int) -> Iterator[tuple[DecidedGroup, int]]:
        """Groups of a partition that are closed for good, each with the offset committed with it. A
        Decision that did not move the partition names no offset of it: the last one holds."""
        committed = 0
        for decision in self._decisions.values():
            committed = max(committed, _committed(decision, partition) or 0)
            for group in decision.groups:
                if group.partition == partition:
                    yield group, max(committed, _behind(group))

    def decided_others(self) -> Iterator[Member]:
        """Trajectories that are done, outside of groups."""
        for decision in self._decisions.values():
            yield from decision.others

    def offsets(self) -> dict[int, PartitionOffsets]:
        """Of each partition, what the last Decision says that moved it."""
        return {
            offsets.partition: offsets
            for decision in self._decisions.values()
            for offsets in decision.offsets
        }

    def oldest_needed(self) -> int | None:
        """sequence of the oldest Decision that a rebuild needs: an assembler remembers its groups, or
        reads its records again."""
        oldest = {
            offsets.partition: min(offsets.committed - DECIDED_MEMORY, offsets.rebuild)
            for decision in self._decisions.values()
            for offsets in decision.offsets
        }
        for sequence, decision in self._decisions.items():
            if any(offsets.committed >= oldest[offsets.partition] for offsets in decision.offsets):
                return sequence
        return None


def group_id(group: DecidedGroup) -> GroupId:
    return GroupId(group.partition, group.prompt_uid, group.first_offset)


def trajectory_verdicts(decision: Decision) -> Iterator[str]:
    """What became of every trajectory that a Decision names. Members of a group that is not trained
    share its fate, unless they have one of their own."""
    for group in decision.groups:
        for member in group.members:
            yield group.verdict if member.verdict == "train" else member.verdict
    yield from (member.verdict for member in decision.others)


def _behind(group: DecidedGroup) -> int:
    """The offset behind its last record."""
    return 1 + max((offset for member in group.members for offset in member.offsets), default=-1)


def _committed(decision: Decision, partition: int) -> int | None:
    return next((o.committed for o in decision.offsets if o.partition == partition), None)
