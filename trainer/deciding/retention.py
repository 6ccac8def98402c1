"""The log's own deadline: records that open state or a restart still needs must not be deleted.

Retention deletes whole segments from the front of a partition. While nothing was deleted yet there is
nothing to fear; afterwards, whatever lies in the first tenth of what is left may go next.
"""

from schemas import Decision
from trainer.incarnation import Incarnation

MARGIN = 0.1


class Retention:
    def __init__(self, incarnation: Incarnation) -> None:
        self._life = incarnation
        self.saved_version = 0
        """Of the newest checkpoint: what it has seen need not be read again."""
        self.checkpoint_is_due = False

    def endangered(self) -> dict[int, int]:
        """The partitions whose open state may lose records, with the offset up to which they may."""
        limits = self._limits()
        unsaved = self._life.ledger.trained_after(self.saved_version)
        self.checkpoint_is_due = any(_begins_before(decision, limits) for decision in unsaved)
        return {
            at.partition: limits[at.partition]
            for at in self._life.consumer.offsets()
            # Before the first commit the offsets are negative: there is nothing to lose yet.
            if 0 <= at.rebuild < limits.get(at.partition, 0)
        }

    def _limits(self) -> dict[int, int]:
        bounds = self._life.consumer.bounds()
        return {
            partition: low + int((end - low) * MARGIN)
            for partition, (low, end) in bounds.items()
            if low > 0
        }


def _begins_before(decision: Decision, limits: dict[int, int]) -> bool:
    return any(
        min(member.offsets, default=limits.get(group.partition, 0)) < limits.get(group.partition, 0)
        for group in decision.groups
        if group.verdict == "train"
        for member in group.members
    )
