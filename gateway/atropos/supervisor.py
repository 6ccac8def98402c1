"""Supervisor process: holds the listening socket and restarts the server behind it.

Stock environments give up after three seconds without a server, so a server that dies must be back
before that, and no client may see "connection refused" meanwhile. The supervisor holds the socket and
does nothing else that could fail. The server is a forked child, so all modules are already imported
when it starts. When it is killed, the next one is forked at once, and connections wait in the socket's
backlog until it accepts them. A server that exits by itself has reported why and is not restarted.
"""

import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from typing import NamedTuple

from servicekit.errors import SteplogError

log = logging.getLogger(__name__)

STABLE_AFTER_S = 5.0
"""A server that was killed after running this long is restarted without a pause."""
RESTART_PAUSE_S = 1.0
REFUSED = 1
"""Exit code of a server that cannot run and printed a sentence that says why."""
CRASHED = 70
"""Exit code after an unhandled exception; the server is restarted."""


class Supervision(NamedTuple):
    """What a server knows about its supervisor."""

    owner: str
    """Id of the supervisor. If the run's previous server had the same one, it is certainly over."""
    supervisor_fd: int
    """End of a pipe that becomes readable when the supervisor exits."""
    is_first_start: bool


def supervise(serve: Callable[[Supervision], None]) -> int:
    """Runs `serve` in a child process and restarts it whenever it is killed or crashes; returns its
    exit code once it exits by itself."""
    read_end, write_end = os.pipe()
    supervision = Supervision(uuid.uuid4().hex, read_end, True)
    while True:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(write_end)
            _run_child(serve, supervision)
        supervision = supervision._replace(is_first_start=False)
        code = _wait_for_exit(child)
        if code is not None and code != CRASHED:
            return code
        log.warning("The server process died; it is restarted.")
        if time.monotonic() - started < STABLE_AFTER_S:
            time.sleep(RESTART_PAUSE_S)


def _run_child(serve: Callable[[Supervision], None], supervision: Supervision) -> None:
    """Serves, then exits the process: never returns."""
    code = CRASHED
    try:
        serve(supervision)
        code = 0
    except KeyboardInterrupt:
        code = 0
    except SteplogError as error:
        sys.stderr.write(f"steplog: {error}\n")
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_exit(child: int) -> int | None:
    """Returns the child's exit code, or None if a signal killed it. If this process is interrupted,
    the child is terminated first."""
    try:
        _, status = os.waitpid(child, 0)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None
