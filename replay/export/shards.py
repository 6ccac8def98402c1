"""The files of an export."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from replay.dataset.rows import Exported, StepRow, StepTextRow
from replay.export import jsonl
from replay.export.late_feedback import LateFeedback
from replay.settings import ExportSettings
from servicekit.distribution import install_command
from servicekit.errors import Fatal

MIB = 1024 * 1024


class Writer(Protocol):
    rows: int
    size: int

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def add(self, one: Exported) -> None: ...


class Shards:
    """Writes into one file, or into a folder's files one after the other."""

    def __init__(self, settings: ExportSettings, path: Path) -> None:
        self.files: list[Path] = []
        self.rows = 0
        self._settings = settings
        self._path = path
        self._limit = settings.shard_mib * MIB
        self._writer: Writer | None = None

    def add(self, one: Exported) -> None:
        if self._writer is None:
            self._writer = self._open()
        self._writer.add(one)
        if not self._settings.is_one_file and self._writer.size >= self._limit:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self.rows += self._writer.rows
            self._writer = None

    def amend(self, late: LateFeedback) -> None:
        """Once all is written: what came late goes into the rows that it is about."""
        for path in self.files if late.count else ():
            amend_file(self._settings, path, late)

    def abandon(self, error: BaseException) -> None:
        if self._writer is not None:
            self._writer.__exit__(type(error), error, error.__traceback__)

    def _open(self) -> Writer:
        path = self._path
        if not self._settings.is_one_file:
            path = path / f"data-{len(self.files):05}.{self._settings.file_format}"
        self.files.append(path)
        return open_file(self._settings, path).__enter__()


def open_file(settings: ExportSettings, path: Path) -> Writer:
    if settings.file_format == "jsonl":
        return jsonl.JsonlWriter(path, settings.per)
    step: type[StepRow] = StepRow if settings.tokenizer is None else StepTextRow
    check_parquet()
    from replay.export.parquet import ParquetWriter

    return ParquetWriter(path, settings.per, step)


def amend_file(settings: ExportSettings, path: Path, late: LateFeedback) -> None:
    if settings.file_format == "jsonl":
        jsonl.amend(path, late)
        return
    from replay.export import parquet

    parquet.amend(path, late)


def check_parquet() -> None:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise Fatal(
            f"Parquet needs pyarrow: {install_command('parquet')}, or use JSON lines"
        ) from error


@contextmanager
def open_shards(settings: ExportSettings, path: Path) -> Iterator[Shards]:
    shards = Shards(settings, path)
    try:
        yield shards
        shards.close()
    except BaseException as error:
        shards.abandon(error)
        raise
