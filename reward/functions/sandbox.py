"""Runs untrusted code in a process without network; the inside is `confined.py`.

What the process cannot do is listed there. Here: it starts with an empty environment in a new folder,
gets its input, and is killed at a time limit; a bounded part of its output is read.

It needs Linux on x86_64 or aarch64, with system-call filters. There are two ways to block the network;
what the machine supports is tried before the first use, with a connection that must fail.
"""

import asyncio
import json
import logging
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from reward.functions import confined
from servicekit.errors import Fatal
from steplog.rewards import RewardUnavailable

log = logging.getLogger(__name__)

CONFINED_SCRIPT = Path(confined.__file__)
SYSTEM_PATHS = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
MAX_REPORT = 1 << 20
"""Bytes; a program that reports more is killed."""
TAIL_BYTES = 2_000
PROBE_TIMEOUT_S = 30.0
PROBE_PROGRAM = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.stdin.readline())), timeout=5)
except OSError:
    print("unreachable")
"""


class SandboxUnavailable(Fatal):
    """This machine cannot run untrusted code safely."""


@dataclass(frozen=True)
class Finished:
    """The result of a program in the sandbox."""

    report: bytes
    """What the program wrote to its original standard output."""
    tail: str
    """The end of everything else that was printed."""
    status: int | None
    """The exit status, negative for a signal; None if it was killed at a limit."""


@dataclass(frozen=True)
class Sandbox:
    """Create it with `open_sandbox`, which finds out what this machine supports."""

    limit_s: float
    memory_mb: int
    file_mb: int = 16
    namespace: bool = True
    seccomp: bool = True
    landlock: bool = True

    async def run(self, program: Path, stdin: bytes) -> Finished:
        """Runs the program, which can read `stdin` from its standard input."""
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="steplog-sandbox-")
        try:
            # An unnamed file: the limit on file sizes stops a flood of output.
            with tempfile.TemporaryFile() as output:
                return await self._run(program, stdin, folder, output)
        finally:
            await asyncio.to_thread(_remove, folder)

    async def _run(self, program: Path, stdin: bytes, folder: str, output: IO[bytes]) -> Finished:
        process = await asyncio.create_subprocess_exec(
            *self._command(program, folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        report = bytearray()
        in_time = False
        try:
            async with asyncio.timeout(self.limit_s):
                in_time = await _exchange(process, stdin, report)
                if in_time:
                    await process.wait()
        except TimeoutError:
            in_time = False
        finally:
            # It cannot start other processes, so nothing of it is left.
            with suppress(ProcessLookupError):
                process.kill()
            status = await process.wait()
        return _finished(bytes(report), _tail(output), status if in_time else None)

    def _command(self, program: Path, folder: str) -> list[str]:
        options = {
            "program": str(program),
            "folder": folder,
            "readable": _readable(),
            "memory_mb": self.memory_mb,
            "cpu_s": math.ceil(self.limit_s) + 1,
            "file_mb": self.file_mb,
            "namespace": self.namespace,
            "seccomp": self.seccomp,
            "landlock": self.landlock,
        }
        return [sys.executable, "-s", "-P", "-B", str(CONFINED_SCRIPT), json.dumps(options)]


def open_sandbox(limit_s: float, memory_mb: int, network: str = "") -> Sandbox:
    """A sandbox that has been tried out. `network` selects how the network is blocked: `namespace`,
    `seccomp`, or by default both where the machine supports them."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in confined.CALLS:
        raise SandboxUnavailable(
            f"Untrusted code can be run only on Linux on {' or '.join(confined.CALLS)}; this is "
            f"{sys.platform} on {machine}."
        )
    sandbox = Sandbox(limit_s, memory_mb, landlock=_has_landlock())
    variants = {
        "": [sandbox, replace(sandbox, namespace=False)],
        "namespace": [replace(sandbox, seccomp=False)],
        "seccomp": [replace(sandbox, namespace=False)],
    }
    problems = []
    for variant in variants[network]:
        problem = probe(variant)
        if problem is None:
            return variant
        problems.append(problem)
    raise SandboxUnavailable(
        "Code cannot be run without network on this machine: neither a network namespace nor a seccomp "
        f"filter works ({'; '.join(problems)})."
    )


def _has_landlock() -> bool:
    if confined.landlock_version() > 0:
        return True
    if os.geteuid() == 0:
        raise SandboxUnavailable(
            "Running untrusted code as root requires a kernel with Landlock. Run the worker as a user "
            "who owns nothing of value."
        )
    log.warning("The kernel has no Landlock: code can read and write whatever this user can.")
    return False


def probe(sandbox: Sandbox) -> str | None:
    """The problem of a sandbox: it does not start, or it can reach a port of this machine."""
    folder = tempfile.mkdtemp(prefix="steplog-sandbox-")
    program = Path(folder) / "probe.py"
    program.write_text(PROBE_PROGRAM)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            done = subprocess.run(
                sandbox._command(program, folder),
                input=str(server.getsockname()[1]).encode(),
                capture_output=True,
                cwd=folder,
                env=_environment(folder),
                timeout=PROBE_TIMEOUT_S,
                start_new_session=True,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        _remove(folder)
    if done.stdout == confined.READY + b"unreachable\n":
        return None
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return last or "the network could be reached"


async def _exchange(process: asyncio.subprocess.Process, stdin: bytes, report: bytearray) -> bool:
    """Sends the input and reads the report. Returns whether it ended within the size limit."""
    assert process.stdin is not None and process.stdout is not None
    writing = asyncio.create_task(_write(process.stdin, stdin))
    try:
        while data := await process.stdout.read(1 << 16):
            report += data
            if len(report) > MAX_REPORT:
                return False
        return True
    finally:
        writing.cancel()


async def _write(stream: asyncio.StreamWriter, stdin: bytes) -> None:
    with suppress(ConnectionError):  # the program need not read its input
        stream.write(stdin)
        await stream.drain()
        stream.close()


def _finished(report: bytes, tail: str, status: int | None) -> Finished:
    if not report.startswith(confined.READY):
        # Nothing of the program ran, so this is a problem of the machine and not of the code.
        raise RewardUnavailable(f"the sandbox did not start: {tail or 'it timed out'}")
    return Finished(report.removeprefix(confined.READY), tail, status)


def _tail(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    return output.read(TAIL_BYTES).decode(errors="replace").strip()


def _environment(folder: str) -> dict[str, str]:
    """A fixed hash seed makes results repeatable. Libraries that would start a thread per core get one,
    since each thread takes memory."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _readable() -> list[str]:
    """Paths of Python and its libraries."""
    own = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()]
    return sorted({*SYSTEM_PATHS, *own, *(os.path.realpath(path) for path in own)})


def _remove(folder: str) -> None:
    """Removes the folder, including subfolders that the code locked. The code is dead by then, so
    nothing changes meanwhile."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(0o700)
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError) as error:
        log.warning("%s could not be removed: %s", folder, error)
