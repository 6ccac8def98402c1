"""`steplog replay export`: writes trajectories of the log to files, as a data set.

A trajectory's reward is the last one in the exported range, so the same range always gives the same
files, as long as the log keeps it.
"""

from collections.abc import Iterator
from pathlib import Path

from pool.core.trajectories import Trajectory
from pool.readers.dataset import Dataset
from replay.dataset.formats import require_pyarrow
from replay.dataset.rows import ExportedTrajectory
from replay.export.atomic_path import write_atomically
from replay.export.dataset_card import write_card
from replay.export.late_feedback import LateFeedback
from replay.export.shards import ExportShards, open_shards
from replay.export.text import StepTextDecoder
from replay.export.trajectory_rows import to_rows
from replay.settings import DatasetExportSettings
from schemas import Feedback
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress

BAR_INTERVAL = 100
"""Trajectories between two updates of the progress bar."""


def export(settings: DatasetExportSettings) -> str:
    """Writes the files; returns a summary."""
    if settings.file_format == "parquet":
        require_pyarrow()
    decoder = StepTextDecoder(settings.tokenizer) if settings.tokenizer else None
    codec = settings.codec()
    with (
        Dataset(settings, settings.read_from, settings, settings.channel, codec) as dataset,
        write_atomically(settings.into) as path,
    ):
        late, topic = LateFeedback(), settings.topic_name(settings.read_from)
        trajectories = _trajectories(dataset, late)
        rows = (to_rows(t, topic, late, decoder) for t in trajectories)
        shards, count = _write(settings, path, rows)
        if not count:
            raise Fatal(f"No trajectory of {topic} matches the selection; nothing was written.")
        shards.amend(late)
        if not settings.is_one_file:
            write_card(settings, path, dataset.ranges.by_partition, count)
    return _summary(settings, shards, count, dataset)


def _trajectories(dataset: Dataset, late: LateFeedback) -> Iterator[Trajectory]:
    """The trajectories of the data set; Feedback outside of them is collected in `late`."""
    with show_progress("exporting", dataset.scan.total) as update:
        for number, item in enumerate(dataset.items()):
            if isinstance(item, Trajectory):
                yield item
            elif isinstance(item.received.record, Feedback):
                late.add(item.received)
            else:
                yield from dataset.posted_trajectories(item)
            if number % BAR_INTERVAL == 0:
                update(dataset.scan.done)


def _write(
    settings: DatasetExportSettings, path: Path, rows: Iterator[ExportedTrajectory]
) -> tuple[ExportShards, int]:
    """Returns the written shards and the number of trajectories."""
    count = 0
    if not settings.is_one_file:
        path.mkdir()
    with open_shards(settings, path) as shards:
        for row in rows:
            shards.add(row)
            count += 1
    return shards, count


def _summary(
    settings: DatasetExportSettings, shards: ExportShards, trajectories: int, dataset: Dataset
) -> str:
    summary = f"{trajectories:,} trajectories, {shards.rows:,} rows in {settings.into}"
    if dataset.missed:
        summary += f"; {dataset.missed:,} trajectories began too long before the range: left out"
    if dataset.unreadable:
        summary += f"; {dataset.unreadable:,} records were not written by steplog: left out"
    return summary
