"""The rollouts that an environment keeps for people: lines of JSON, and a page of the newest."""

import json
from collections import deque
from pathlib import Path
from typing import Any

from steplog.environment.group import Group
from steplog.environment.page import write_page


class Rollouts:
    def __init__(self, folder: Path, name: str, title: str, keep: int, jsonl: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._title = title
        self._newest: deque[dict[str, Any]] = deque(maxlen=keep)
        self.lines = folder / f"{name}.jsonl" if jsonl else None
        self.page = folder / f"{name}.html"

    def add(self, group: Group[Any]) -> None:
        line = group.line()
        self._newest.appendleft(line)
        if self.lines is not None:
            # Half of a pair of surrogates has no form in UTF-8, and models do write it.
            with self.lines.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def write_page(self) -> None:
        write_page(self.page, self._title, self._newest)


def fresh(folder: Path) -> Path:
    """The folder, or the first `…-2`, `…-3` that does not exist: what was kept stays."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found
