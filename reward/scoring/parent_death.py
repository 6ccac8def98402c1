"""Ends a process together with its parent, even if the parent is killed with SIGKILL (Linux only).

A function that never returns would otherwise outlive its worker. No code of ours can prevent that: a
regular expression that never ends keeps the interpreter from running anything else. The kernel can.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
