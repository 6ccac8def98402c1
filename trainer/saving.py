"""When rank 0 saves: every few versions, earlier if Kafka may delete records that a restart would need,
and when the run ends or is stopped."""

from trainer.decisions.decider import Decider
from trainer.progress.reporter import ProgressReporter
from trainer.rank_orders import RankOrders
from trainer.training import DecisionTraining


class Saving:
    def __init__(
        self,
        every: int,
        training: DecisionTraining,
        decider: Decider,
        orders: RankOrders,
        progress: ProgressReporter,
    ) -> None:
        """`every` is the number of versions between two checkpoints."""
        self._every = every
        self._training = training
        self._decider = decider
        self._orders = orders
        self._progress = progress
        self._begun_version = training.version
        """Version of the newest checkpoint that is complete or being written."""
        self._noted_version: int | None = None

    def save_if_due(self) -> None:
        self.note_complete()
        is_due = self._training.version - self._begun_version >= self._every
        # A checkpoint that is being written removes the danger for all records before it.
        is_urgent = self._decider.checkpoint_is_due() and not self._training.writer.is_writing
        if is_due or is_urgent:
            self._save()

    def note_complete(self) -> None:
        """Tells the decider of a checkpoint that has been completed; raises Fatal if it failed."""
        version = self._training.writer.poll()
        if version is not None and version != self._noted_version:
            self._noted_version = version
            self._decider.note_checkpoint(version)

    def finish(self) -> None:
        """Saves the last version, waits until it is on disk, and writes it as a Hugging Face folder."""
        if self._training.version > self._begun_version:
            self._save()
        with self._progress.phase("checkpointing"):
            self._training.writer.wait()
            self.note_complete()
            if self._training.is_model_due():
                self._orders.send("export")
                self._training.export_model()

    def _save(self) -> None:
        with self._progress.phase("checkpointing"):
            self._orders.send("save")
            self._training.save()
        self._begun_version = self._training.version
