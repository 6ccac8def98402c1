"""Log files that do not grow for ever.

A part has its file open for appending, and nobody stands between the two. With a pipe through the
supervisor instead, killing the supervisor would take away the parts' output, and then the parts. So a
file that has grown is copied, and cut to nothing in its place: whoever appends goes on at the new
beginning. What is written between the last copied byte and the cut is lost, which takes some
microseconds; a kill in between leaves lines in two files, and never in none.
"""

import os
import shutil
from pathlib import Path

LARGEST = 16 * 1024 * 1024
KEPT = 3
"""Older files of each log, the newest with number 1."""


def rotate(log: Path) -> bool:
    """Whether the file was large enough to be put aside."""
    if not log.exists() or log.stat().st_size <= LARGEST:
        return False
    fresh = numbered(log, 0)
    with log.open("rb") as grown, fresh.open("wb") as copy:
        shutil.copyfileobj(grown, copy)
        for number in reversed(range(KEPT)):
            if numbered(log, number).exists():
                numbered(log, number).replace(numbered(log, number + 1))
        shutil.copyfileobj(grown, copy)  # what came meanwhile
        os.truncate(log, 0)
    return True


def numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
