"""Files to trajectories, one at a time, each with the place that it was read from."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from replay.dataset.rows import FORMAT, Exported, StepRow, TrajectoryRow, packed
from replay.export.shards import check_parquet
from replay.importer.records import BadRow
from replay.importer.whitebox import Dump
from servicekit.errors import Fatal

BATCH = 128
"""Rows of a Parquet file that are held at once."""


class Found(NamedTuple):
    where: str
    one: Exported


class Files:
    """Read them as often as you like; a mistake is told with its file and line."""

    def __init__(self, given: Sequence[Path], run: str | None, channel: str) -> None:
        self.paths = [path for one in given for path in _files(one)]
        self._run = run
        self._channel = channel
        if any(path.suffix == ".parquet" for path in self.paths):
            check_parquet()

    def __iter__(self) -> Iterator[Found]:
        for path in self.paths:
            yield from _parquet(path) if path.suffix == ".parquet" else self._jsonl(path)

    def _jsonl(self, path: Path) -> Iterator[Found]:
        lines = Lines(path)
        try:
            for one in self._trajectories(lines):
                yield Found(f"{path}:{lines.number}", one)
        except (BadRow, msgspec.MsgspecError, RecursionError) as error:
            raise Fatal(f"{path}:{lines.number} cannot be imported: {error}") from error
        except OSError as error:
            raise Fatal(f"{path} cannot be read: {error.strerror}") from error

    def _trajectories(self, lines: "Lines") -> Iterator[Exported]:
        """A file's first line tells what all of its lines are."""
        first = next(iter(lines), {})
        if "trajectory_uid" in first and "steps" in first:
            yield from (_trajectory(line) for line in lines)
        elif "step_id" in first:
            yield from joined(_step(line) for line in lines)
        else:
            dump = Dump(self._run, self._channel)
            for line in lines:
                yield from dump.add(line)
            yield from dump.rest()


class Lines:
    """The objects of a JSONL file, and the number of the last one that was read."""

    def __init__(self, path: Path) -> None:
        self.number = 0
        self._path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            for self.number, line in enumerate(file, 1):
                if line.strip():
                    yield msgspec.json.decode(line, type=dict[str, Any])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(one for kind in ("*.parquet", "*.jsonl") for one in path.glob(kind))
    if not found:
        raise Fatal(f"{path} has no file that ends in .parquet or .jsonl")
    return found


def _trajectory(line: dict[str, Any]) -> Exported:
    steps = msgspec.convert(line["steps"], list[dict[str, Any]])
    return Exported(_about(line), list(map(_step_row, steps)))


def _step(line: dict[str, Any]) -> tuple[TrajectoryRow, StepRow]:
    return _about(line), _step_row(line)


def _step_row(line: dict[str, Any]) -> StepRow:
    try:
        return msgspec.convert(packed(line), StepRow, builtin_types=(bytes,))
    except (TypeError, OverflowError) as error:
        raise BadRow(f"its ids or logprobs are no such numbers: {error}") from error


def _about(line: dict[str, Any]) -> TrajectoryRow:
    check_format(line.get("format"))
    return msgspec.convert(line, TrajectoryRow)


def check_format(found: object) -> None:
    if found != FORMAT:
        later = isinstance(found, int) and found > FORMAT
        told = "it was exported by a later version: import it with that one"
        raise BadRow(f"its format is {found}: " + (told if later else "it is no export of ours"))


def joined(rows: Iterable[tuple[TrajectoryRow, StepRow]]) -> Iterator[Exported]:
    """Rows of Steps to trajectories; the rows of one stand together."""
    for _, group in groupby(rows, key=lambda row: row[0].trajectory_uid):
        members = list(group)
        yield Exported(members[0][0], [step for _, step in members])


def _parquet(path: Path) -> Iterator[Found]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    done = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            batches = file.iter_batches(BATCH)
            for one in _of_steps(batches) if "step_id" in names else _of_trajectories(batches):
                done += 1
                yield Found(f"{path}, trajectory {done}", one)
    except (BadRow, KeyError, pa.ArrowException) as error:
        told = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
        told = " ".join(told.split())
        raise Fatal(f"{path} cannot be imported, after {done:,} trajectories: {told}") from error
    except OSError as error:
        raise Fatal(f"{path} cannot be read: {error.strerror or error}") from error


def _of_trajectories(batches: Iterable[Any]) -> Iterator[Exported]:
    from replay.dataset.arrow import unnested

    for batch in batches:
        steps = unnested(StepRow, batch["steps"])
        yield from map(Exported, _abouts(batch), steps)


def _of_steps(batches: Iterable[Any]) -> Iterator[Exported]:
    from replay.dataset.arrow import rows

    def read() -> Iterator[tuple[TrajectoryRow, StepRow]]:
        for batch in batches:
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            yield from zip(_abouts(batch), rows(StepRow, columns, len(batch)), strict=True)

    return joined(read())


def _abouts(batch: Any) -> list[TrajectoryRow]:
    from replay.dataset.arrow import rows

    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for found in columns["format"].unique().to_pylist():
        check_format(found)
    return rows(TrajectoryRow, columns, len(batch))
