"""Calling the code of environment authors: describing what it raises, checking what it returns.

A rollout that raises fails alone. Any other method that raises stops the environment, or costs one
row of metrics. Either way, one sentence names the method, the error and the line.
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

SDK_FOLDER = Path(__file__).parent
AUTHOR_ERRORS = (Exception, SystemExit, asyncio.CancelledError)
"""What a rollout may end with: code that is being tested may call exit(), and the code that runs it may
cancel itself."""


def describe_error(error: BaseException) -> str:
    """The error, and the line of the author's code that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    frames = [frame for frame in extract_tb(error.__traceback__) if _is_authors(frame.filename)]
    return f"{words} ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else words


def _is_authors(file: str) -> bool:
    return SDK_FOLDER not in Path(file).parents and not file.startswith("<")


def count_cancel_requests() -> int:
    """How often this task was asked to end. A CancelledError without such a request comes from the
    author's code. One that leaves a TaskGroup may leave its request behind, so only new requests
    count."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def is_requested_cancellation(error: BaseException, requests_before: int) -> bool:
    """Whether the error is a cancellation that was requested after `requests_before` was counted."""
    return isinstance(error, asyncio.CancelledError) and count_cancel_requests() > requests_before


@contextmanager
def required_call(method: str) -> Iterator[None]:
    """Wraps a call of an author's method without which the environment cannot continue."""
    try:
        yield
    except EnvironmentFailed:
        raise
    except Exception as error:
        raise EnvironmentFailed(f"{method} failed: {describe_error(error)}") from error


def finite_numbers(source: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The values that can be reported; there is one warning for each of the others."""
    if not isinstance(values, Mapping):
        raise EnvironmentFailed(
            f"{source} must map names to numbers, but is a {type(values).__name__}."
        )
    numbers = {str(name): _finite_number(value) for name, value in values.items()}
    for name in [name for name, number in numbers.items() if number is None]:
        _warn_about(source, name)
    return {name: number for name, number in numbers.items() if number is not None}


def _finite_number(value: Any) -> float | None:
    try:
        number = float(value)
    except Exception:  # the value may be any object of the author's
        return None
    return number if math.isfinite(number) else None


@cache
def _warn_about(source: str, name: str) -> None:
    log.warning("%s: the value of %s is not a finite number and is left out.", source, name)
