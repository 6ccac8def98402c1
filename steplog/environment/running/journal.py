"""What an environment must remember when it is killed: a file of JSON lines, each written in time.

    {"drawn": 7, "state": …}      item 7 is about to be drawn; the environment's state before that
    {"begun": 7, "urls": […]}     base URLs of trajectories that are about to be registered
    {"ended": 7, "ends": {…}}     how each of them ends; from here on the group is complete
    {"dropped": 7}                all of them are cancelled
    {"done": 7, "state": …}       the gateway has the whole group
    {"evaluated": 40}             the evaluation at version 40 is complete

Reading the file again tells which items are open. A group that had ended is sent again unchanged, so it
is neither lost nor duplicated. A group that had only begun is cancelled, and its item is drawn again:
items follow from the seed and the state, which includes their index. So a kill costs the rollouts that
were running, and nothing else.
"""

import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from steplog.environment.backends.backend import Ending
from steplog.environment.errors import EnvironmentFailed

Json = dict[str, Any]
COMPACT_AFTER = 2_000
"""Lines after which the file is rewritten with the open items only."""


@dataclass
class OpenItem:
    """An item that was drawn and whose group may not be completely in the log."""

    state: Json = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    endings: dict[str, Ending] | None = None


class Journal:
    """Without a file, it lasts only as long as the process."""

    def __init__(self, file: Path | None) -> None:
        self._path = file
        self._file: TextIO | None = None
        self._lines = 0
        self.open: dict[int, OpenItem] = {}
        self.done: set[int] = set()
        """Finished items above `first`."""
        self.first = 0
        """The lowest number that is not done."""
        self.state: Json = {}
        """The environment's newest recorded state."""
        self.evaluated: int | None = None
        """The version of the last complete evaluation, if they follow versions."""
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(file.with_suffix(".lock"))
            try:
                self._read(file)
                self._compact(file)
            except EnvironmentFailed:
                self.close()
                raise

    @property
    def count(self) -> int:
        """The number of finished groups."""
        return self.first + len(self.done)

    @property
    def first_state(self) -> Json:
        """The environment's state before the item with which drawing continues."""
        item = self.open.get(self.first)
        return self.state if item is None else item.state

    def is_done(self, number: int) -> bool:
        return number < self.first or number in self.done

    def record_draw(self, number: int, state: Json) -> None:
        self._write({"drawn": number, "state": state})

    def record_start(self, number: int, urls: Sequence[str]) -> None:
        self._write({"begun": number, "urls": list(urls)})

    def record_endings(self, number: int, endings: Mapping[str, Ending]) -> None:
        ends = {url: ending.body() for url, ending in endings.items()}
        self._write({"ended": number, "ends": ends})

    def record_cancelled(self, number: int) -> None:
        """Its trajectories are cancelled; another process will draw the item again."""
        self._write({"dropped": number})

    def record_done(self, number: int, state: Json) -> None:
        self._write({"done": number, "state": state})
        if self._path is not None and self._lines > COMPACT_AFTER:
            self._compact(self._path)

    def record_evaluation(self, version: int) -> None:
        self._write({"evaluated": version})

    def close(self) -> None:
        if self._path is not None:
            self._lock.close()
        if self._file is not None:
            self._file.close()

    def _write(self, line: Json) -> None:
        self._apply(line)
        if self._file is not None:
            self._file.write(encode_line(line))
            self._file.flush()
            self._lines += 1

    def _apply(self, line: Json) -> None:
        match line:
            case {"first": first, "done": done, "state": state}:
                self.first, self.done, self.state = first, set(done), state
            case {"drawn": number, "state": state}:
                self.open[number] = OpenItem(state)
                self.state = state
            case {"begun": number, "urls": urls}:
                self.open[number].urls += urls
            case {"ended": number, "ends": ends}:
                self.open[number].endings = {url: Ending(**end) for url, end in ends.items()}
            case {"dropped": number}:
                self.open[number].urls = []
            case {"done": number, "state": state}:
                self.open.pop(number, None)
                self.done.add(number)
                self.state = state
                while self.first in self.done:
                    self.done.remove(self.first)
                    self.first += 1
            case {"evaluated": version}:
                self.evaluated = version

    def _read(self, file: Path) -> None:
        if not file.exists():
            return
        *lines, _ = file.read_text(encoding="utf-8").split("\n")  # a kill may leave half a line
        try:
            for line in lines:
                self._apply(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailed(
                f"{file} is damaged ({error}). Remove it, or its folder, to start from the beginning."
            ) from error

    def _compact(self, file: Path) -> None:
        """Write the same state in fewer lines; a kill leaves either the old file or the new one."""
        lines: list[Json] = []
        for number, item in sorted(self.open.items()):
            lines.append({"drawn": number, "state": item.state})
            lines.append({"begun": number, "urls": item.urls})
            if item.endings is not None:
                ends = {url: ending.body() for url, ending in item.endings.items()}
                lines.append({"ended": number, "ends": ends})
        lines.append({"first": self.first, "done": sorted(self.done), "state": self.state})
        if self.evaluated is not None:
            lines.append({"evaluated": self.evaluated})
        new_file = file.with_suffix(".new")
        new_file.write_text("".join(map(encode_line, lines)), encoding="utf-8")
        if self._file is not None:
            self._file.close()
        new_file.replace(file)
        self._file = file.open("a", encoding="utf-8")
        self._lines = len(lines)


def _lock(file: Path) -> TextIO:
    """A lock that this process holds until it ends, however it ends."""
    lock = file.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise EnvironmentFailed(
            f"Another process is serving in {file.parent}. Stop it, or choose another --dir."
        ) from None
    return lock


def encode_line(line: Json) -> str:
    try:
        return json.dumps(line, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(
            f"state_dict() must return values that JSON can represent: {error}"
        ) from error
