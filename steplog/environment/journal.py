"""What an environment must not forget when it is killed: lines of a file, each written in time.

    {"drawn": 7, "state": …}      item 7 is about to be drawn; the environment's state before
    {"begun": 7, "urls": […]}     trajectories that are about to be registered
    {"ended": 7, "ends": {…}}     how each of them ends; from here on the group is whole
    {"dropped": 7}                all of them are cancelled
    {"done": 7, "state": …}       the gateway has all of it

Read again, it tells which items are open. A group that had ended is sent again, word by word; it is
neither lost nor there twice. One that had only begun is cancelled, and its item is drawn again: items
follow from the seed and the state, of which their index is a part. So a kill costs the rollouts that
ran, nothing else.
"""

import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from steplog.environment.client import Ending
from steplog.environment.errors import EnvironmentFailed

Json = dict[str, Any]
COMPACT_AFTER = 2_000
"""Lines after which the file is written anew with what is open."""


@dataclass
class Open:
    """An item that was drawn, and of which the log may not have all."""

    state: Json = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    ends: dict[str, Ending] | None = None


class Journal:
    """Without a file it remembers for its own life only."""

    def __init__(self, file: Path | None) -> None:
        self._path = file
        self._file: TextIO | None = None
        self._lines = 0
        self.open: dict[int, Open] = {}
        self.done: set[int] = set()
        """Above `first`, which is the lowest number that is not done."""
        self.first = 0
        self.state: Json = {}
        """The newest that is known."""
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(file.with_suffix(".lock"))
            try:
                self._read(file)
                self._compact(file)
            except EnvironmentFailed:
                self.close()
                raise

    @property
    def count(self) -> int:
        """Groups that are done."""
        return self.first + len(self.done)

    @property
    def first_state(self) -> Json:
        """The environment's state before the item from which drawing goes on."""
        drawn = self.open.get(self.first)
        return self.state if drawn is None else drawn.state

    def is_done(self, number: int) -> bool:
        return number < self.first or number in self.done

    def drawn(self, number: int, state: Json) -> None:
        self._write({"drawn": number, "state": state})

    def begun(self, number: int, urls: Sequence[str]) -> None:
        self._write({"begun": number, "urls": list(urls)})

    def ended(self, number: int, ends: Mapping[str, Ending]) -> None:
        self._write({"ended": number, "ends": {url: end.body() for url, end in ends.items()}})

    def dropped(self, number: int) -> None:
        """It was cancelled, and will be drawn again in another life."""
        self._write({"dropped": number})

    def finished(self, number: int, state: Json) -> None:
        self._write({"done": number, "state": state})
        if self._path is not None and self._lines > COMPACT_AFTER:
            self._compact(self._path)

    def close(self) -> None:
        if self._path is not None:
            self._lock.close()
        if self._file is not None:
            self._file.close()

    def _write(self, line: Json) -> None:
        self._apply(line)
        if self._file is not None:
            self._file.write(encoded(line))
            self._file.flush()
            self._lines += 1

    def _apply(self, line: Json) -> None:
        match line:
            case {"first": first, "done": done, "state": state}:
                self.first, self.done, self.state = first, set(done), state
            case {"drawn": number, "state": state}:
                self.open[number] = Open(state)
                self.state = state
            case {"begun": number, "urls": urls}:
                self.open[number].urls += urls
            case {"ended": number, "ends": ends}:
                self.open[number].ends = {url: Ending(**end) for url, end in ends.items()}
            case {"dropped": number}:
                self.open[number].urls = []
            case {"done": number, "state": state}:
                self.open.pop(number, None)
                self.done.add(number)
                self.state = state
                while self.first in self.done:
                    self.done.remove(self.first)
                    self.first += 1

    def _read(self, file: Path) -> None:
        if not file.exists():
            return
        *lines, _ = file.read_text(encoding="utf-8").split("\n")  # a kill may leave half a line
        try:
            for line in lines:
                self._apply(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailed(
                f"{file} is damaged ({error}); remove it, or the folder, to begin anew"
            ) from error

    def _compact(self, file: Path) -> None:
        """The same in fewer lines; a kill leaves the one file or the other."""
        lines: list[Json] = []
        for number, drawn in sorted(self.open.items()):
            lines.append({"drawn": number, "state": drawn.state})
            lines.append({"begun": number, "urls": drawn.urls})
            if drawn.ends is not None:
                ends = {url: end.body() for url, end in drawn.ends.items()}
                lines.append({"ended": number, "ends": ends})
        lines.append({"first": self.first, "done": sorted(self.done), "state": self.state})
        beside = file.with_suffix(".new")
        beside.write_text("".join(map(encoded, lines)), encoding="utf-8")
        if self._file is not None:
            self._file.close()
        beside.replace(file)
        self._file = file.open("a", encoding="utf-8")
        self._lines = len(lines)


def _locked(file: Path) -> TextIO:
    """Held by this process until it ends, however it ends."""
    lock = file.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise EnvironmentFailed(
            f"another process serves in {file.parent}; stop it, or give another --dir"
        ) from None
    return lock


def encoded(line: Json) -> str:
    try:
        return json.dumps(line, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"state_dict() must hold what JSON can: {error}") from error
