"""Processes that outlive the process that started them, identified by more than their pid.

The kernel reuses pids, but not together with the time at which a process was started. Both are recorded
before the command runs: it starts as a shell that waits for a line on its input, and if the starting
process dies before it writes that line, the shell exits. So no process runs that is not recorded.

Each process leads a session of its own. Ctrl-C in a terminal does not reach it, and its child processes
(vLLM's engine core, the processes of a reward worker) can be ended together with it.
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
WAIT_FOR_GO = 'read -r go && exec "$@" </dev/null'


@dataclass(frozen=True)
class StartedProcess:
    pid: int
    born: str
    """When it was started, to tell it from other processes with the same pid; see `start_time`."""

    def is_running(self) -> bool:
        return start_time(self.pid) == self.born

    def signal(self, number: int) -> None:
        if self.is_running():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, limit: float) -> None:
        """Terminate it, kill it after the limit, then kill the rest of its session."""
        self.signal(signal.SIGTERM)
        if not wait_for(lambda: not self.is_running(), limit):
            self.signal(signal.SIGKILL)
            wait_for(lambda: not self.is_running(), limit)
        self.kill_session()

    def kill_session(self) -> None:
        """Kill the other processes of its session, once it is gone itself.

        The kernel does not reuse a pid that still names a process group. So if no process has the pid,
        a group of that number is ours, unless the machine has been rebooted.
        """
        if start_time(self.pid) is None and self.born.startswith(_boot()):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], limit: float) -> bool:
    """Whether the condition became true within the limit, in seconds."""
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
    record: Callable[[StartedProcess], None],
) -> "tuple[StartedProcess, subprocess.Popen[bytes]]":
    """Start a command. It does not run before `record` has stored the process."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", WAIT_FOR_GO, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    process = StartedProcess(child.pid, start_time(child.pid) or "")
    record(process)
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:
        child.stdin.write(b"go\n")
    return process, child


def start_time(pid: int) -> str | None:
    """Boot id and start time of a process; None if it is gone or a zombie."""
    if Path("/proc/self/stat").exists():
        try:
            return None if is_zombie(pid) else f"{_boot()}{_stat(pid)[19]}"
        except OSError:
            return None
    ps = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return ps.stdout.strip() or None


def is_zombie(pid: int) -> bool:
    """Whether it has ended and only its exit status is left. A killed process is marked so as soon
    as its first thread is gone, while other threads may still hold its ports. Needs /proc."""
    return _stat(pid)[0] in "ZX" and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1


def _stat(pid: int) -> list[str]:
    # The fields follow the program's name, which may contain any character.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _boot() -> str:
    file = Path("/proc/sys/kernel/random/boot_id")
    return f"{file.read_text().strip()[:8]}-" if file.exists() else ""
