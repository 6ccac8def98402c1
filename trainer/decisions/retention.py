"""Watches Kafka's retention: records that open groups or a restart still need must not be deleted.

Retention deletes whole segments from the front of a partition. As long as nothing was deleted yet,
nothing is in danger. Afterwards, whatever lies in the first tenth of the remaining records may be
deleted next.
"""

from schemas import Decision
from trainer.incarnation.live import LiveIncarnation

MARGIN = 0.1
"""Share of the remaining records that may be deleted next."""


class Retention:
    def __init__(self, incarnation: LiveIncarnation) -> None:
        self._incarnation = incarnation
        self.saved_version = 0
        """Version of the newest checkpoint; the batches up to it need not be read again."""
        self.checkpoint_is_due = False

    def endangered(self) -> dict[int, int]:
        """Partitions whose open groups may lose records, with the offset below which they may. Also
        notes whether a checkpoint is due, because batches trained since the last one are in danger."""
        limits = self._limits()
        unsaved = self._incarnation.ledger.trained_after(self.saved_version)
        self.checkpoint_is_due = any(_begins_before(decision, limits) for decision in unsaved)
        return {
            offsets.partition: limits[offsets.partition]
            for offsets in self._incarnation.consumer.offsets()
            # Offsets are negative before the first commit: there is nothing to lose yet.
            if 0 <= offsets.rebuild < limits.get(offsets.partition, 0)
        }

    def _limits(self) -> dict[int, int]:
        bounds = self._incarnation.consumer.bounds()
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
