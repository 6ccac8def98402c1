"""Rows as Parquet, a trajectory or a Step in each.

Rows gather until their numbers fill a row group, which a thread of its own encodes and writes while
the next one gathers: at most two are in memory, however long the log is.
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

from replay.dataset.arrow import columns, fields, nested, table_rows
from replay.dataset.rows import NUMBERS, Amendable, Exported, StepRow, TrajectoryRow
from replay.export.atomic_path import durable
from replay.export.jsonl import Per
from replay.export.late_feedback import LateFeedback
from replay.export.trajectory_rows import amended

SUFFIX = ".parquet"
ROW_GROUP = 16 * 1024 * 1024
"""Bytes of ids and logprobs. A reader holds a row group at a time, too."""
SPLIT = "BYTE_STREAM_SPLIT"
"""Bytes of equal weight stand together: numbers then take a quarter less, in less time."""


class ParquetWriter:
    """One file."""

    def __init__(self, path: Path, per: Per, step: type[StepRow]) -> None:
        self.rows = 0
        self.size = 0
        """What is written so far; row groups that wait are not."""
        self._path = path
        self._per = per
        self._step = step
        self._schema = _schema(per, step)
        self._waiting: list[Exported] = []
        self._bytes = 0
        self._open = ExitStack()
        self._file = self._open.enter_context(_new_file(path, self._schema))
        self._thread = self._open.enter_context(ThreadPoolExecutor(1, "parquet"))
        self._writing: Future[None] | None = None

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
                self._settle()

    def add(self, one: Exported) -> None:
        self._waiting.append(one)
        self.rows += 1 if self._per == "trajectory" else len(one.steps)
        self._bytes += sum(map(_bytes, one.steps))
        if self._bytes >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        """The table is made here: that is Python's work, of which two threads do no more than one."""
        if self._waiting:
            table = self._table(self._waiting)
            self._waiting, self._bytes = [], 0
            self._settle()
            self._writing = self._thread.submit(self._write, table)

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, table: pa.Table) -> None:
        self._file.write_table(table)
        self.size = self._path.stat().st_size

    def _table(self, rows: Sequence[Exported]) -> pa.Table:
        if self._per == "trajectory":
            about = columns(TrajectoryRow, [row.trajectory for row in rows])
            steps = [nested(self._step, [row.steps for row in rows])]
        else:
            repeated = chain.from_iterable(repeat(r.trajectory, len(r.steps)) for r in rows)
            about = columns(TrajectoryRow, list(repeated))
            steps = columns(self._step, list(chain.from_iterable(row.steps for row in rows)))
        return pa.Table.from_arrays([*about, *steps], schema=self._schema)


def _schema(per: Per, step: type[StepRow]) -> pa.Schema:
    steps = fields(step)
    if per == "trajectory":
        steps = [pa.field("steps", pa.list_(pa.struct(steps)))]
    return pa.schema([*fields(TrajectoryRow), *steps])


def _bytes(step: StepRow) -> int:
    return len(step.prompt_ids or b"") + 2 * len(step.response_ids)


@contextmanager
def _new_file(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Arrow opens the file itself: to write to one of Python's, its thread would wait for ours.
    Among numbers little is repeated, so they have no dictionary."""
    leaves = _leaves(schema)
    numbers = [leaf for leaf in leaves if NUMBERS.keys() & set(leaf.split("."))]
    words = [leaf for leaf in leaves if leaf not in numbers]
    with (
        durable(path),
        pq.ParquetWriter(
            path,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=words,
            column_encoding=dict.fromkeys(numbers, SPLIT),
            write_statistics=words,
        ) as file,
    ):
        yield file


def _leaves(schema: pa.Schema) -> list[str]:
    """The paths of the columns, as Parquet names them."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema):
        pass
    parquet = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [parquet.column(number).path for number in range(len(parquet))]


def amend(path: Path, late: LateFeedback) -> None:
    """Writes the file again, if something came later about one of its rows. Until the export is
    complete nobody needs the old one, so the new one takes its name at once."""
    with pq.ParquetFile(path) as old:
        groups = range(old.num_row_groups)
        if not any(_amended(old, group, late) for group in groups):
            return
        path.unlink()
        with _new_file(path, old.schema_arrow) as new:
            for group in groups:
                table = old.read_row_group(group)
                for name, column in _amended(old, group, late).items():
                    at = table.schema.get_field_index(name)
                    table = table.set_column(at, table.schema.field(at), column)
                new.write_table(table)


def _amended(file: pq.ParquetFile, group: int, late: LateFeedback) -> dict[str, pa.Array]:
    """The columns that change; none, if nothing does."""
    names = list(Amendable.__struct_fields__)
    before: list[Amendable] = table_rows(Amendable, file.read_row_group(group, names))
    after = [amended(row, late.on(row.trajectory_uid)) for row in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return {}
    return dict(zip(names, columns(Amendable, after), strict=True))
