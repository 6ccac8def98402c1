"""Reads trajectories from exported files and white-box dumps, one at a time."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from replay.dataset.formats import require_pyarrow
from replay.dataset.rows import FORMAT, ExportedTrajectory, StepRow, TrajectoryRow, pack_numbers
from replay.importer.records import BadRow
from replay.importer.whitebox import WhiteboxDump
from servicekit.errors import Fatal

BATCH = 128
"""Rows of a Parquet file in memory at once."""


class ReadTrajectory(NamedTuple):
    """A trajectory and where it was read, for error messages: FILE:LINE, or FILE, trajectory NUMBER."""

    location: str
    trajectory: ExportedTrajectory


class ImportFiles:
    """The trajectories of some files; iterate as often as needed. An invalid row is a Fatal that names
    its file and line."""

    def __init__(self, paths: Sequence[Path], run: str | None, channel: str) -> None:
        self.paths = [file for path in paths for file in _files(path)]
        self._run = run
        self._channel = channel
        if any(path.suffix == ".parquet" for path in self.paths):
            require_pyarrow()

    def __iter__(self) -> Iterator[ReadTrajectory]:
        for path in self.paths:
            yield from _parquet(path) if path.suffix == ".parquet" else self._jsonl(path)

    def _jsonl(self, path: Path) -> Iterator[ReadTrajectory]:
        lines = JsonLines(path)
        try:
            for trajectory in self._trajectories(lines):
                yield ReadTrajectory(f"{path}:{lines.number}", trajectory)
        except (BadRow, msgspec.MsgspecError, RecursionError) as error:
            raise Fatal(f"{path}:{lines.number} cannot be imported: {error}") from error
        except OSError as error:
            raise Fatal(f"{path} cannot be read: {error.strerror}") from error

    def _trajectories(self, lines: "JsonLines") -> Iterator[ExportedTrajectory]:
        """The first line shows whether lines are trajectories, Steps, or a white-box dump."""
        first = next(iter(lines), {})
        if "trajectory_uid" in first and "steps" in first:
            yield from (_trajectory(line) for line in lines)
        elif "step_id" in first:
            yield from _join_steps(_step(line) for line in lines)
        else:
            dump = WhiteboxDump(self._run, self._channel)
            for line in lines:
                yield from dump.add(line)
            yield from dump.unended()


class JsonLines:
    """The objects of a JSONL file, and the number of the last line that was read."""

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
    files = sorted(file for pattern in ("*.parquet", "*.jsonl") for file in path.glob(pattern))
    if not files:
        raise Fatal(f"{path} has no file that ends in .parquet or .jsonl.")
    return files


def _trajectory(line: dict[str, Any]) -> ExportedTrajectory:
    steps = msgspec.convert(line["steps"], list[dict[str, Any]])
    return ExportedTrajectory(_trajectory_row(line), list(map(_step_row, steps)))


def _step(line: dict[str, Any]) -> tuple[TrajectoryRow, StepRow]:
    return _trajectory_row(line), _step_row(line)


def _step_row(line: dict[str, Any]) -> StepRow:
    try:
        return msgspec.convert(pack_numbers(line), StepRow, builtin_types=(bytes,))
    except (TypeError, OverflowError) as error:
        raise BadRow(f"its ids or logprobs are not valid numbers: {error}") from error


def _trajectory_row(line: dict[str, Any]) -> TrajectoryRow:
    _check_format(line.get("format"))
    return msgspec.convert(line, TrajectoryRow)


def _check_format(number: object) -> None:
    if isinstance(number, int) and number > FORMAT:
        raise BadRow(
            f"its format is {number}: a later version exported it; import it with that one"
        )
    if number != FORMAT:
        raise BadRow(f"its format is {number}: steplog did not export it")


def _join_steps(rows: Iterable[tuple[TrajectoryRow, StepRow]]) -> Iterator[ExportedTrajectory]:
    """Step rows to trajectories; the rows of a trajectory must be consecutive."""
    for _, group in groupby(rows, key=lambda row: row[0].trajectory_uid):
        members = list(group)
        yield ExportedTrajectory(members[0][0], [step for _, step in members])


def _parquet(path: Path) -> Iterator[ReadTrajectory]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            batches = file.iter_batches(BATCH)
            from_batches = _from_step_rows if "step_id" in names else _from_trajectory_rows
            for trajectory in from_batches(batches):
                count += 1
                yield ReadTrajectory(f"{path}, trajectory {count}", trajectory)
    except (BadRow, KeyError, pa.ArrowException) as error:
        reason = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
        reason = " ".join(reason.split())
        raise Fatal(
            f"{path} cannot be imported, after {count:,} good trajectories: {reason}"
        ) from error
    except OSError as error:
        raise Fatal(f"{path} cannot be read: {error.strerror or error}") from error


def _from_trajectory_rows(batches: Iterable[Any]) -> Iterator[ExportedTrajectory]:
    from replay.dataset.arrow import from_list_array

    for batch in batches:
        steps = from_list_array(StepRow, batch["steps"])
        yield from map(ExportedTrajectory, _trajectory_rows(batch), steps)


def _from_step_rows(batches: Iterable[Any]) -> Iterator[ExportedTrajectory]:
    from replay.dataset.arrow import from_columns

    def read() -> Iterator[tuple[TrajectoryRow, StepRow]]:
        for batch in batches:
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            steps = from_columns(StepRow, columns, len(batch))
            yield from zip(_trajectory_rows(batch), steps, strict=True)

    return _join_steps(read())


def _trajectory_rows(batch: Any) -> list[TrajectoryRow]:
    from replay.dataset.arrow import from_columns

    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for number in columns["format"].unique().to_pylist():
        _check_format(number)
    return from_columns(TrajectoryRow, columns, len(batch))
