"""`steplog replay export`: trajectories of the log as a data set in files.

A trajectory's reward is the last one that the exported range holds, so the same range gives the same
files whenever it is asked for, as long as the log keeps it.
"""

from collections.abc import Iterator
from pathlib import Path

from pool.core.trajectories import Trajectory
from pool.readers.dataset import Dataset
from replay.dataset.rows import Exported
from replay.export import dataset_card
from replay.export.atomic_path import new_place
from replay.export.late_feedback import LateFeedback
from replay.export.shards import Shards, check_parquet, open_shards
from replay.export.text import Texts
from replay.export.trajectory_rows import exported
from replay.settings import ExportSettings
from schemas import Feedback
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress

LOOK_EVERY = 100
"""Trajectories after which the bar moves."""


def export(settings: ExportSettings) -> str:
    """Writes the files; says what it wrote."""
    if settings.file_format == "parquet":
        check_parquet()
    texts = Texts(settings.tokenizer) if settings.tokenizer else None
    codec = settings.codec()
    with (
        Dataset(settings, settings.read_from, settings, settings.channel, codec) as dataset,
        new_place(settings.into) as path,
    ):
        late, topic = LateFeedback(), settings.topic_name(settings.read_from)
        whole = _trajectories(dataset, late)
        rows = (exported(one, topic, late.on(one.uid), texts) for one in whole)
        shards, trajectories = _write(settings, path, rows)
        if not trajectories:
            raise Fatal(f"no trajectory of {topic} is as selected, so nothing was written")
        shards.amend(late)
        if not settings.is_one_file:
            dataset_card.write(settings, path, dataset.spans, trajectories)
    return _summary(settings, shards, trajectories, dataset)


def _trajectories(dataset: Dataset, late: LateFeedback) -> Iterator[Trajectory]:
    with show_progress("exporting", dataset.scan.total) as moved:
        for number, item in enumerate(dataset.items()):
            if isinstance(item, Trajectory):
                yield item
            elif isinstance(item.received.record, Feedback):
                late.add(item.received)
            else:
                yield from dataset.posted_trajectories(item)
            if number % LOOK_EVERY == 0:
                moved(dataset.scan.done)


def _write(settings: ExportSettings, path: Path, rows: Iterator[Exported]) -> tuple[Shards, int]:
    trajectories = 0
    if not settings.is_one_file:
        path.mkdir()
    with open_shards(settings, path) as shards:
        for row in rows:
            shards.add(row)
            trajectories += 1
    return shards, trajectories


def _summary(settings: ExportSettings, shards: Shards, trajectories: int, dataset: Dataset) -> str:
    told = f"{trajectories:,} trajectories, {shards.rows:,} rows in {settings.into}"
    if dataset.missed:
        told += f"; {dataset.missed:,} began too long before the range and are left out"
    if dataset.unreadable:
        told += f"; {dataset.unreadable:,} records are none of ours"
    return told
