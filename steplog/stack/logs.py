"""Rotation of the parts' log files.

A part appends to its file directly. If its output went through a pipe to the supervisor instead,
killing the supervisor would break the output and then the part. So a file that has grown is copied
and then truncated in place; the part continues to append to it. Lines written in the microseconds
between the last copied byte and the truncation are lost. A kill in between leaves lines in both
files, never in none.
"""

import os
import shutil
from pathlib import Path

LARGEST_BYTES = 16 * 1024 * 1024
OLDER_FILES = 3
"""Older files that are kept of each log; number 1 is the newest."""


def rotate(log: Path) -> bool:
    """Rotate the log if it is too large; returns whether it was."""
    if not log.exists() or log.stat().st_size <= LARGEST_BYTES:
        return False
    newest = numbered(log, 0)
    with log.open("rb") as grown, newest.open("wb") as copy:
        shutil.copyfileobj(grown, copy)
        for number in reversed(range(OLDER_FILES)):
            if numbered(log, number).exists():
                numbered(log, number).replace(numbered(log, number + 1))
        shutil.copyfileobj(grown, copy)  # what was appended meanwhile
        os.truncate(log, 0)
    return True


def numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
