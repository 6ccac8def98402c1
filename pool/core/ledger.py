"""The ledger: the trainer's write-ahead log, folded into what a restart needs.

A Decision is committed together with the offsets that it consumed, before anything is trained. From
then on its batch is fixed: a restart trains the Decisions after its checkpoint again, from the same
records, and learns from the other Decisions which groups are already decided.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pool.core.group_assembler import DECIDED_MEMORY
from schemas import DecidedGroup, Decision, Member, Outcome, PartitionOffsets, Record
from servicekit.errors import Fatal

WITHDRAWN = ("lost", "given_up")
"""Verdicts of later Decisions on groups that an earlier one chose for training."""


class GroupId(NamedTuple):
    partition: int
    prompt_uid: str
    first_offset: int


class TrainedTwice(Fatal):
    """Two Decisions name the same group with the verdict `train`."""


class Ledger:
    """One run's Decisions and Outcomes, in the order of the topic."""

    def __init__(self, run: str, records: Iterable[Record] = ()) -> None:
        self.run = run
        self.sequence = 0
        """The sequence number of the last Decision."""
        self.verdicts: Counter[str] = Counter()
        """Trajectories by verdict, over all Decisions."""
        self._decisions: dict[int, Decision] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._trained: dict[GroupId, int] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        if isinstance(record, Decision) and record.run == self.run:
            self._add_decision(record)
        elif isinstance(record, Outcome) and record.run == self.run:
            self._outcomes[record.sequence] = record

    def _add_decision(self, decision: Decision) -> None:
        if decision.sequence in self._decisions:
            return  # a repeated copy; the first by offset counts
        for group in decision.groups:
            if group.verdict == "train":
                self._check_trained_once(group, decision.sequence)
        self._decisions[decision.sequence] = decision
        self.sequence = max(self.sequence, decision.sequence)
        self.verdicts.update(trajectory_verdicts(decision))

    def _check_trained_once(self, group: DecidedGroup, sequence: int) -> None:
        earlier = self._trained.setdefault(group_id(group), sequence)
        if earlier != sequence:
            raise TrainedTwice(
                f"group {group.prompt_uid} at offset {group.first_offset} of partition "
                f"{group.partition} is trained by Decisions {earlier} and {sequence}"
            )

    @property
    def topic(self) -> str | None:
        """The topic whose records the Decisions name."""
        return next((decision.topic for decision in self._decisions.values()), None)

    def decision(self, sequence: int) -> Decision | None:
        return self._decisions.get(sequence)

    def trained_after(self, version: int) -> list[Decision]:
        """The Decisions with a batch that a checkpoint of `version` does not include, in order."""
        decisions = self._decisions.values()
        return [d for d in decisions if d.version is not None and d.version > version]

    def outcome(self, sequence: int) -> Outcome | None:
        return self._outcomes.get(sequence)

    def withdrawn_groups(self) -> set[GroupId]:
        """Groups of a batch that are not trained after all, as a later Decision states: their records
        were deleted before, or an operator has given the batch up."""
        return {
            group_id(group)
            for decision in self._decisions.values()
            for group in decision.groups
            if group.verdict in WITHDRAWN
        }

    def forget_before(self, sequence: int) -> None:
        """Drops Decisions that are no longer needed, so that a long run takes no more memory than a
        short one."""
        self._decisions = {n: d for n, d in self._decisions.items() if n >= sequence}
        self._outcomes = {n: o for n, o in self._outcomes.items() if n >= sequence}
        self._trained = {group: n for group, n in self._trained.items() if n >= sequence}

    def decided_groups(self, partition: int) -> Iterator[tuple[DecidedGroup, int]]:
        """Decided groups of a partition, each with the offset that was committed together with it. A
        Decision that did not move the partition has no offset for it; then the previous one holds."""
        committed = 0
        for decision in self._decisions.values():
            committed = max(committed, _committed_offset(decision, partition) or 0)
            for group in decision.groups:
                if group.partition == partition:
                    yield group, max(committed, _offset_behind(group))

    def decided_others(self) -> Iterator[Member]:
        """Trajectories that Decisions name outside of groups."""
        for decision in self._decisions.values():
            yield from decision.others

    def offsets(self) -> dict[int, PartitionOffsets]:
        """The offsets of each partition in the last Decision that moved it."""
        return {
            offsets.partition: offsets
            for decision in self._decisions.values()
            for offsets in decision.offsets
        }

    def oldest_needed(self) -> int | None:
        """Sequence number of the oldest Decision that a rebuild needs, because an assembler must
        remember its groups or read its records again."""
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
    """The verdict on every trajectory that a Decision names. Members of a group that is not trained
    get the group's verdict, unless they have one of their own."""
    for group in decision.groups:
        for member in group.members:
            yield group.verdict if member.verdict == "train" else member.verdict
    yield from (member.verdict for member in decision.others)


def _offset_behind(group: DecidedGroup) -> int:
    """The offset behind the group's last record."""
    return 1 + max((offset for member in group.members for offset in member.offsets), default=-1)


def _committed_offset(decision: Decision, partition: int) -> int | None:
    return next((o.committed for o in decision.offsets if o.partition == partition), None)
