"""What authors of environments wrote: what it raises and returns, in words for a person.

A rollout that raises fails alone. Whatever else of theirs raises stops the environment, or costs a
row of metrics; either way one sentence names the method, the error and the line.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any

from steplog.environment.errors import EnvironmentFailed

log = logging.getLogger(__name__)

RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""Code that is tried out may call exit(), and what runs it may cancel itself: both end a rollout."""


def told(error: BaseException) -> str:
    """The error, and the line of the author's code that met it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    frames = [frame for frame in extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    return f"{words} ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else words


def _is_theirs(file: str) -> bool:
    return Path(file).parent != Path(__file__).parent and not file.startswith("<")


def cancellations() -> int:
    """How often this task was asked to end. A CancelledError without such a question is the author's;
    one that leaves a TaskGroup may have left a question behind, so only new ones tell."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def is_asked_to_end(error: BaseException, before: int) -> bool:
    """Whether it is a cancellation that was asked for since `before` was counted."""
    return isinstance(error, asyncio.CancelledError) and cancellations() > before


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """The environment cannot go on without what is done here."""
    try:
        yield
    except EnvironmentFailed:
        raise
    except Exception as error:
        raise EnvironmentFailed(f"{what} failed: {told(error)}") from error


def numbers(where: str, given: Mapping[str, Any]) -> dict[str, float]:
    """Those that can be reported; the others are told once."""
    if not isinstance(given, Mapping):
        raise EnvironmentFailed(f"{where} must be names and numbers, not {type(given).__name__}")
    found = {str(name): _number(value) for name, value in given.items()}
    for name in [name for name, value in found.items() if value is None]:
        _warn_of(where, name)
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except Exception:  # any object of theirs
        return None
    return number if math.isfinite(number) else None


@cache
def _warn_of(where: str, name: str) -> None:
    log.warning("%s has a value of %s that is no finite number; it is left out", where, name)
