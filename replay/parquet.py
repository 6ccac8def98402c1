"""Rows as Parquet, a trajectory or a Step in each.

Rows gather until their numbers fill a row group, which a thread of its own encodes and writes while
the next one gathers: at most two are in memory, however long the log is.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from replay.arrow import columns, fields, nested
from replay.jsonl import Per
from replay.place import durable
from replay.rows import Exported, StepRow, TrajectoryRow

SUFFIX = ".parquet"
ROW_GROUP = 16 * 1024 * 1024
"""Bytes of ids and logprobs. A reader holds a row group at a time, too."""
SPLIT = "BYTE_STREAM_SPLIT"
"""Bytes of equal weight stand together: logprobs then take a third less, in less time."""
NUMBERS = ("prompt_ids", "response_ids", "logprobs")
"""Columns in which nothing is repeated often enough for a dictionary."""


class ParquetWriter:
    """One file."""

    def __init__(self, path: Path, per: Per, step: type[StepRow]) -> None:
        self.rows = 0
        self.size = 0
        """What is written so far; row groups that wait are not."""
        self._per = per
        self._step = step
        self._waiting: list[Exported] = []
        self._bytes = 0
        self._open = ExitStack()
        self._file = self._open.enter_context(durable(path))
        self._writer = self._open.enter_context(_writer(self._file, self._schema()))
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
        self._settle()
        if self._waiting:
            self._writing = self._thread.submit(self._write, self._waiting)
        self._waiting, self._bytes = [], 0

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, rows: Sequence[Exported]) -> None:
        self._writer.write_table(self._table(rows))
        self.size = self._file.tell()

    def _table(self, rows: Sequence[Exported]) -> pa.Table:
        if self._per == "trajectory":
            about = columns(TrajectoryRow, [row.trajectory for row in rows])
            steps = [nested(self._step, [row.steps for row in rows])]
        else:
            repeated = chain.from_iterable(repeat(r.trajectory, len(r.steps)) for r in rows)
            about = columns(TrajectoryRow, list(repeated))
            steps = columns(self._step, list(chain.from_iterable(row.steps for row in rows)))
        return pa.Table.from_arrays([*about, *steps], schema=self._schema())

    def _schema(self) -> pa.Schema:
        steps = fields(self._step)
        if self._per == "trajectory":
            steps = [pa.field("steps", pa.list_(pa.struct(steps)))]
        return pa.schema([*fields(TrajectoryRow), *steps])


def _bytes(step: StepRow) -> int:
    prompt = len(step.prompt_ids.packed) if step.prompt_ids else 0
    return prompt + 2 * len(step.response_ids.packed)


def _writer(file: Any, schema: pa.Schema) -> pq.ParquetWriter:
    leaves = _leaves(schema)
    words = [leaf for leaf in leaves if not set(leaf.split(".")) & set(NUMBERS)]
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=words,
        column_encoding={leaf: SPLIT for leaf in leaves if "logprobs" in leaf.split(".")},
        write_statistics=words,
    )


def _leaves(schema: pa.Schema) -> list[str]:
    """The paths of the columns, as Parquet names them."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema):
        pass
    parquet = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [parquet.column(number).path for number in range(len(parquet))]
