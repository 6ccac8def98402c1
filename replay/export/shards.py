"""The files of an export: one file, or numbered shards in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from replay.dataset.formats import require_pyarrow
from replay.dataset.rows import ExportedTrajectory, StepRow, StepTextRow
from replay.export import jsonl
from replay.export.late_feedback import LateFeedback
from replay.settings import DatasetExportSettings

MIB = 1024 * 1024


class RowWriter(Protocol):
    rows: int
    size: int

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def add(self, trajectory: ExportedTrajectory) -> None: ...


class ExportShards:
    """Writes into one file, or into a folder's shards one after the other."""

    def __init__(self, settings: DatasetExportSettings, path: Path) -> None:
        self.files: list[Path] = []
        self.rows = 0
        self._settings = settings
        self._path = path
        self._limit = settings.shard_mib * MIB
        self._writer: RowWriter | None = None

    def add(self, trajectory: ExportedTrajectory) -> None:
        if self._writer is None:
            self._writer = self._open()
        self._writer.add(trajectory)
        if not self._settings.is_one_file and self._writer.size >= self._limit:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self.rows += self._writer.rows
            self._writer = None

    def amend(self, late: LateFeedback) -> None:
        """Adds late Feedback to the rows it is about; call it when all rows are written."""
        for path in self.files if late.count else ():
            _amend_file(self._settings, path, late)

    def abandon(self, error: BaseException) -> None:
        if self._writer is not None:
            self._writer.__exit__(type(error), error, error.__traceback__)

    def _open(self) -> RowWriter:
        path = self._path
        if not self._settings.is_one_file:
            path = path / f"data-{len(self.files):05}.{self._settings.file_format}"
        self.files.append(path)
        return _open_writer(self._settings, path).__enter__()


def _open_writer(settings: DatasetExportSettings, path: Path) -> RowWriter:
    if settings.file_format == "jsonl":
        return jsonl.JsonlWriter(path, settings.per)
    step_type: type[StepRow] = StepRow if settings.tokenizer is None else StepTextRow
    require_pyarrow()
    from replay.export.parquet import ParquetWriter

    return ParquetWriter(path, settings.per, step_type)


def _amend_file(settings: DatasetExportSettings, path: Path, late: LateFeedback) -> None:
    if settings.file_format == "jsonl":
        jsonl.amend(path, late)
        return
    from replay.export import parquet

    parquet.amend(path, late)


@contextmanager
def open_shards(settings: DatasetExportSettings, path: Path) -> Iterator[ExportShards]:
    shards = ExportShards(settings, path)
    try:
        yield shards
        shards.close()
    except BaseException as error:
        shards.abandon(error)
        raise
