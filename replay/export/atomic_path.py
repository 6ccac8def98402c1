"""Where an export goes: a folder or a file that is either complete or not there.

It is written beside its place, under a name that says so, and takes its place in one step. What a
killed export left behind is overwritten by the next one to the same place.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from servicekit.errors import Fatal


@contextmanager
def new_place(into: Path) -> Iterator[Path]:
    """A path to write to, as a folder or a file; it becomes `into` when nothing went wrong."""
    _check_free(into)
    unfinished = into.with_name(f".{into.name}.part")
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
        yield unfinished
        unfinished.replace(into)
    except OSError as error:
        raise Fatal(f"{into} cannot be written: {error.strerror or error}") from error
    finally:
        _remove(unfinished)


def _check_free(into: Path) -> None:
    if into.is_dir():
        if any(into.iterdir()):
            raise Fatal(f"{into} is not empty; choose another --into")
    elif into.exists():
        raise Fatal(f"{into} exists; choose another --into")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk when it is closed: its name must not outlive its content."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
