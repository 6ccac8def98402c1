"""Writes rows as Parquet: one trajectory or one Step per row.

Rows are buffered until their numbers fill a row group. A thread encodes and writes it while the next
one is buffered: at most two are in memory, however long the log is.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from replay.dataset.arrow import columns, fields, from_table, to_list_array
from replay.dataset.formats import RowKind
from replay.dataset.rows import (
    NUMBER_COLUMNS,
    AmendableRow,
    ExportedTrajectory,
    StepRow,
    TrajectoryRow,
)
from replay.export.atomic_path import open_durable
from replay.export.late_feedback import LateFeedback
from replay.export.trajectory_rows import with_late_feedback

ROW_GROUP_BYTES = 16 * 1024 * 1024
"""Ids and logprobs of a row group. A reader holds one row group at a time, too."""
NUMBER_ENCODING = "BYTE_STREAM_SPLIT"
"""Groups bytes of equal significance: numbers then take a quarter less space, and less time."""


class ParquetWriter:
    """Writes one file."""

    def __init__(self, path: Path, row_kind: RowKind, step_type: type[StepRow]) -> None:
        self.rows = 0
        self.size = 0
        """Bytes written so far, without buffered row groups."""
        self._path = path
        self._row_kind = row_kind
        self._step_type = step_type
        self._schema = _schema(row_kind, step_type)
        self._buffer: list[ExportedTrajectory] = []
        self._buffered_bytes = 0
        self._open = ExitStack()
        self._file = self._open.enter_context(_new_file(path, self._schema))
        self._thread = self._open.enter_context(ThreadPoolExecutor(1, "parquet"))
        self._pending_write: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._open:
            if error is None:
                self._flush()
                self._wait_for_write()

    def add(self, trajectory: ExportedTrajectory) -> None:
        self._buffer.append(trajectory)
        self.rows += 1 if self._row_kind == "trajectory" else len(trajectory.steps)
        self._buffered_bytes += sum(map(_number_bytes, trajectory.steps))
        if self._buffered_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Builds the table in this thread, since that holds the GIL; the encoding does not."""
        if self._buffer:
            table = self._table(self._buffer)
            self._buffer, self._buffered_bytes = [], 0
            self._wait_for_write()
            self._pending_write = self._thread.submit(self._write, table)

    def _wait_for_write(self) -> None:
        if self._pending_write is not None:
            self._pending_write.result()
            self._pending_write = None

    def _write(self, table: pa.Table) -> None:
        self._file.write_table(table)
        self.size = self._path.stat().st_size

    def _table(self, rows: Sequence[ExportedTrajectory]) -> pa.Table:
        if self._row_kind == "trajectory":
            trajectories = columns(TrajectoryRow, [row.trajectory for row in rows])
            steps = [to_list_array(self._step_type, [row.steps for row in rows])]
        else:
            repeated = chain.from_iterable(repeat(r.trajectory, len(r.steps)) for r in rows)
            trajectories = columns(TrajectoryRow, list(repeated))
            steps = columns(self._step_type, list(chain.from_iterable(row.steps for row in rows)))
        return pa.Table.from_arrays([*trajectories, *steps], schema=self._schema)


def _schema(row_kind: RowKind, step_type: type[StepRow]) -> pa.Schema:
    steps = fields(step_type)
    if row_kind == "trajectory":
        steps = [pa.field("steps", pa.list_(pa.struct(steps)))]
    return pa.schema([*fields(TrajectoryRow), *steps])


def _number_bytes(step: StepRow) -> int:
    return len(step.prompt_ids or b"") + 2 * len(step.response_ids)


@contextmanager
def _new_file(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Arrow opens the file itself: writing to a Python file, its thread would wait for the GIL. Numbers
    rarely repeat, so their columns have no dictionary."""
    leaves = _leaves(schema)
    numbers = [leaf for leaf in leaves if NUMBER_COLUMNS.keys() & set(leaf.split("."))]
    others = [leaf for leaf in leaves if leaf not in numbers]
    with (
        open_durable(path),
        pq.ParquetWriter(
            path,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=others,
            column_encoding=dict.fromkeys(numbers, NUMBER_ENCODING),
            write_statistics=others,
        ) as file,
    ):
        yield file


def _leaves(schema: pa.Schema) -> list[str]:
    """Column paths as Parquet names them."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema):
        pass
    parquet = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [parquet.column(number).path for number in range(len(parquet))]


def amend(path: Path, late: LateFeedback) -> None:
    """Writes the file again if there is late Feedback on one of its rows. No reader sees the files
    before the export is complete, so the old one can be removed first."""
    with pq.ParquetFile(path) as old:
        groups = range(old.num_row_groups)
        if not any(_amended_columns(old, group, late) for group in groups):
            return
        path.unlink()
        with _new_file(path, old.schema_arrow) as new:
            for group in groups:
                table = old.read_row_group(group)
                for name, column in _amended_columns(old, group, late).items():
                    index = table.schema.get_field_index(name)
                    table = table.set_column(index, table.schema.field(index), column)
                new.write_table(table)


def _amended_columns(file: pq.ParquetFile, group: int, late: LateFeedback) -> dict[str, pa.Array]:
    """The changed columns by name; empty if no row changes."""
    names = list(AmendableRow.__struct_fields__)
    before: list[AmendableRow] = from_table(AmendableRow, file.read_row_group(group, names))
    after = [with_late_feedback(row, late) for row in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return {}
    return dict(zip(names, columns(AmendableRow, after), strict=True))
