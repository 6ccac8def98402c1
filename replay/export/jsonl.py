"""Writes rows as JSON lines: one trajectory or one Step per line."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from replay.dataset.formats import RowKind
from replay.dataset.rows import AmendableRow, ExportedTrajectory, unpack_numbers
from replay.export.atomic_path import open_durable
from replay.export.late_feedback import LateFeedback
from replay.export.trajectory_rows import with_late_feedback


class JsonlWriter:
    """Writes one file."""

    def __init__(self, path: Path, row_kind: RowKind) -> None:
        self.rows = 0
        self.size = 0
        self._row_kind = row_kind
        self._encoder = msgspec.json.Encoder()
        self._open = ExitStack()
        self._file = self._open.enter_context(open_durable(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def add(self, trajectory: ExportedTrajectory) -> None:
        for columns in self._lines(trajectory):
            line = self._encoder.encode(columns)
            self._file.write(line)
            self._file.write(b"\n")
            self.size += len(line) + 1
            self.rows += 1

    def _lines(self, trajectory: ExportedTrajectory) -> Iterator[dict[str, Any]]:
        columns = msgspec.structs.asdict(trajectory.trajectory)
        if self._row_kind == "trajectory":
            yield columns | {"steps": list(map(unpack_numbers, trajectory.steps))}
            return
        for step in trajectory.steps:
            yield columns | unpack_numbers(step)


def amend(path: Path, late: LateFeedback) -> None:
    """Writes the file again with the late Feedback on its rows. No reader sees the files before the
    export is complete, so the old one can be removed first."""
    decoder = msgspec.json.Decoder(AmendableRow)
    with path.open("rb") as old:
        path.unlink()
        with open_durable(path) as new:
            for line in old:
                row = decoder.decode(line)
                amended = with_late_feedback(row, late)
                new.write(line if amended is row else _replace_columns(line, amended))


def _replace_columns(line: bytes, amended: AmendableRow) -> bytes:
    row = msgspec.json.decode(line) | msgspec.structs.asdict(amended)
    return msgspec.json.encode(row) + b"\n"
