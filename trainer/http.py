"""The trainer's HTTP side: whether it lives, whether it gets on, and its metrics.

A daemon thread serves it, so that nothing here can hold a training step or the end of the process.
"""

import socket
import time
from collections.abc import Callable

import uvicorn

from servicekit.status import make_status_app, serve_in_thread

STALLED_AFTER = 600.0
"""Seconds. One training step or one checkpoint of a large model may take minutes."""


def serve(
    listener: socket.socket,
    progressed: Callable[[], float],
    stalled_after: float = STALLED_AFTER,
) -> uvicorn.Server:
    """Begins to answer on `listener` and comes back; `should_exit` of what it gives ends it.
    `progressed` says when the trainer last committed something or changed its phase, on the monotonic
    clock."""

    def stalled() -> str | None:
        silent = time.monotonic() - progressed()
        if silent <= stalled_after:
            return None
        return f"nothing was committed and no phase changed for {silent:.0f} s"

    return serve_in_thread(make_status_app("steplog trainer", stalled), listener)
