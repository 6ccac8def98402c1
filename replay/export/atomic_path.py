"""Writes a folder or file that is either complete or does not exist.

It is written next to its final path, as `.NAME.part`, and renamed at the end. The remains of a killed
export are overwritten by the next one to the same path.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from servicekit.errors import Fatal


@contextmanager
def write_atomically(into: Path) -> Iterator[Path]:
    """Yields a path for a new folder or file; it is renamed to `into` unless an exception is raised."""
    _check_unused(into)
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


def _check_unused(into: Path) -> None:
    if into.is_dir():
        if any(into.iterdir()):
            raise Fatal(f"{into} is not empty; choose another --into.")
    elif into.exists():
        raise Fatal(f"{into} exists; choose another --into.")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def open_durable(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that is synced to disk on close, so that no name survives without content."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
