"""Rows as JSON lines, a trajectory or a Step in each."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from replay.dataset.rows import Amendable, Exported, unpacked
from replay.export.atomic_path import durable
from replay.export.late_feedback import LateFeedback
from replay.export.trajectory_rows import amended

Per = Literal["trajectory", "step"]
SUFFIX = ".jsonl"


class JsonlWriter:
    """One file."""

    def __init__(self, path: Path, per: Per) -> None:
        self.rows = 0
        self.size = 0
        self._per = per
        self._encoder = msgspec.json.Encoder()
        self._open = ExitStack()
        self._file = self._open.enter_context(durable(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def add(self, one: Exported) -> None:
        for row in self._rows(one):
            line = self._encoder.encode(row)
            self._file.write(line)
            self._file.write(b"\n")
            self.size += len(line) + 1
            self.rows += 1

    def _rows(self, one: Exported) -> Iterator[dict[str, Any]]:
        about = msgspec.structs.asdict(one.trajectory)
        if self._per == "trajectory":
            yield about | {"steps": list(map(unpacked, one.steps))}
            return
        for step in one.steps:
            yield about | unpacked(step)


def amend(path: Path, late: LateFeedback) -> None:
    """Writes the file again, with what came later. Until the export is complete nobody needs the old
    one, so the new one takes its name at once."""
    decoder = msgspec.json.Decoder(Amendable)
    with path.open("rb") as old:
        path.unlink()
        with durable(path) as new:
            for line in old:
                row = decoder.decode(line)
                now = amended(row, late.on(row.trajectory_uid))
                new.write(line if now is row else _with(line, now))


def _with(line: bytes, amended: Amendable) -> bytes:
    row = msgspec.json.decode(line) | msgspec.structs.asdict(amended)
    return msgspec.json.encode(row) + b"\n"
