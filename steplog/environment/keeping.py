"""The rollouts that an environment keeps for people: lines of JSON, and a page of the newest.

The lines outlive the process, and with them the page: a new life begins it with their newest. Where no
lines are kept, the page of the life before stays until there is something to show.
"""

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steplog.environment.group import Group
from steplog.environment.page import write_page

TAIL = 32 * 1024 * 1024
"""Bytes at the end of the lines in which the newest are looked for."""


class Rollouts:
    def __init__(self, folder: Path, name: str, title: str, keep: int, jsonl: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._title = title
        self._newest: deque[dict[str, Any]] = deque(maxlen=keep)
        self.lines = folder / f"{name}.jsonl" if jsonl else None
        self.page = folder / f"{name}.html"
        if self.lines is not None and self.lines.exists():
            self._newest.extendleft(_tail(self.lines, keep))

    def add(self, group: Group[Any]) -> None:
        line = group.line()
        self._newest.appendleft(line)
        if self.lines is not None:
            # Half of a pair of surrogates has no form in UTF-8, and models do write it.
            with self.lines.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def write_page(self) -> None:
        if self._newest or not self.page.exists():
            write_page(self.page, self._title, self._newest)


def _tail(file: Path, count: int) -> Iterator[dict[str, Any]]:
    """The last groups of a file. Its first line may be half of one, and so may one that a kill left."""
    with file.open("rb") as lines:
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - TAIL))
        for line in deque(lines, maxlen=count):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def fresh(folder: Path) -> Path:
    """The folder, or the first `…-2`, `…-3` that does not exist: what was kept stays."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found
