"""Keeps the listening socket, and a server behind it.

Stock environments give up after three seconds, so a server that dies must be back before, and nobody
may be told "connection refused" meanwhile. This process holds the socket and does nothing else that
could fail; the server is a child of it, which has everything imported when it is made. When it is
killed the next one is made at once, and connections wait in the socket's queue until it accepts them.
A server that ends by itself has said why, and is not made again.
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

WELL_AFTER = 5.0
"""Seconds of life after which a server that is killed is made again at once."""
PAUSE = 1.0
REFUSED = 1
CRASHED = 70
"""Exit codes: a sentence for a person was said; or a mistake of ours, which is tried again."""


class Life(NamedTuple):
    """What a server knows of its keeper."""

    owner: str
    """The keeper's name: if the last server was its, that one is over."""
    keeper: int
    """A file that ends when the keeper does."""
    is_first: bool


def keep(serve: Callable[[Life], None]) -> int:
    """Runs `serve` in a child for as long as it is killed; gives its exit code."""
    theirs, ours = os.pipe()
    life = Life(uuid.uuid4().hex, theirs, True)
    while True:
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(ours)
            _be_child(serve, life)
        life = life._replace(is_first=False)
        code = _outlive(child)
        if code is not None and code != CRASHED:
            return code
        log.warning("the server died; it is started again")
        if time.monotonic() - began < WELL_AFTER:
            time.sleep(PAUSE)


def _be_child(serve: Callable[[Life], None], life: Life) -> None:
    """Never returns."""
    code = CRASHED
    try:
        serve(life)
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


def _outlive(child: int) -> int | None:
    """The child's exit code; None if it was killed. What interrupts us ends it first."""
    try:
        _, status = os.waitpid(child, 0)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None
