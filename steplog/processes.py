"""Processes that outlive whoever started them, and can be told from others by more than their pid.

A pid is used again; the moment of a process's birth is not. Both are written down before the process
does anything: it begins as a shell that waits for a word on its input, and if its starter dies before
saying it, the shell ends. So nothing runs that is not in the file.

Each process leads a session of its own. A terminal's Ctrl-C does not reach it, and what it started
(vLLM's engine core, a reward worker's processes) can be ended with it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
WAIT_FOR_THE_WORD = 'read -r word && exec "$@" </dev/null'


@dataclass(frozen=True)
class Process:
    pid: int
    born: str
    """Says which process of that pid is meant; see `birth`."""

    def runs(self) -> bool:
        return birth(self.pid) == self.born

    def signal(self, number: int) -> None:
        if self.runs():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, limit: float) -> None:
        """Asks, waits, and kills; then kills what it left behind."""
        self.signal(signal.SIGTERM)
        if not wait_for(lambda: not self.runs(), limit):
            self.signal(signal.SIGKILL)
            wait_for(lambda: not self.runs(), limit)
        self.end_the_rest()

    def end_the_rest(self) -> None:
        """Its session's other processes, when it is gone itself.

        The kernel gives nobody a pid that still names a group, so if no process has the pid, then a
        group of that number is ours; unless the machine was started anew.
        """
        if birth(self.pid) is None and self.born.startswith(_boot()):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def spawn(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str],
    remember: Callable[[Process], None],
) -> "tuple[Process, subprocess.Popen[bytes]]":
    """`remember` writes it down; the command runs only after that."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", WAIT_FOR_THE_WORD, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    process = Process(child.pid, birth(child.pid) or "")
    remember(process)
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:
        child.stdin.write(b"go\n")
    return process, child


def birth(pid: int) -> str | None:
    """When the process was started, since which boot; None when it is gone or a zombie."""
    if Path("/proc/self/stat").exists():
        try:
            return None if is_zombie(pid) else f"{_boot()}{_stat(pid)[19]}"
        except OSError:
            return None
    told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return told.stdout.strip() or None


def is_zombie(pid: int) -> bool:
    """Whether it has ended, and nobody has asked how. A killed process looks like that as soon as its
    first thread is gone, while others still hold its ports. Where there is /proc."""
    return _stat(pid)[0] in "ZX" and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1


def _stat(pid: int) -> list[str]:
    # The fields follow the name of the program, which may itself hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _boot() -> str:
    file = Path("/proc/sys/kernel/random/boot_id")
    return f"{file.read_text().strip()[:8]}-" if file.exists() else ""
