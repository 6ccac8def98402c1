"""Serves /health, /ready and /metrics of the trainer.

A daemon thread serves them, so that they can delay neither a training step nor the end of the process.
"""

import socket
import time
from collections.abc import Callable

import uvicorn

from servicekit.status import make_status_app, serve_in_thread

STALLED_AFTER = 600.0
"""Seconds without progress; a training step or a checkpoint of a large model may take minutes."""


def serve(
    listener: socket.socket,
    last_progress: Callable[[], float],
    stalled_after: float = STALLED_AFTER,
) -> uvicorn.Server:
    """Starts serving on `listener` and returns; set `should_exit` of the returned server to end it.
    `last_progress` returns when the trainer last committed something or changed its phase, on the
    monotonic clock."""

    def describe_stall() -> str | None:
        seconds = time.monotonic() - last_progress()
        if seconds <= stalled_after:
            return None
        return f"nothing was committed and no phase changed for {seconds:.0f} s"

    return serve_in_thread(make_status_app("steplog trainer", describe_stall), listener)
