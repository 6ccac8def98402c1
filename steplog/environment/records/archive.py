"""The rollouts that an environment stores for people: a JSON-lines file, and an HTML page of the
newest.

The file outlasts the process, and so does the page: a new process starts it with the newest groups
of the file. Without a file, the page of the previous process stays until there is something new to
show.
"""

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steplog.environment.records.page import write_page
from steplog.environment.rollouts.group import Group

TAIL_BYTES = 32 * 1024 * 1024
"""How far before the end of the file the newest groups are looked for."""


class RolloutArchive:
    def __init__(self, folder: Path, name: str, title: str, keep: int, jsonl: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._title = title
        self._newest: deque[dict[str, Any]] = deque(maxlen=keep)
        self.file = folder / f"{name}.jsonl" if jsonl else None
        self.page = folder / f"{name}.html"
        if self.file is not None and self.file.exists():
            self._newest.extendleft(_read_newest(self.file, keep))

    def add(self, group: Group[Any]) -> None:
        document = group.as_json()
        self._newest.appendleft(document)
        if self.file is not None:
            # Models do write lone surrogates, which UTF-8 cannot represent.
            with self.file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(document, ensure_ascii=False, default=str) + "\n")

    def write_page(self) -> None:
        if self._newest or not self.page.exists():
            write_page(self.page, self._title, self._newest)


def _read_newest(file: Path, count: int) -> Iterator[dict[str, Any]]:
    """The last groups of a file. Incomplete lines, at the start of the tail or after a kill, are
    skipped."""
    with file.open("rb") as lines:
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in deque(lines, maxlen=count):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def unused_folder(folder: Path) -> Path:
    """The folder, or the first of `…-2`, `…-3` that does not exist: earlier results are kept."""
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
