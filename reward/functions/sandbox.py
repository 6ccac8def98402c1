"""A separate process for code that nobody trusts, without network; the outside of `confined.py`.

What the process cannot do is listed there. Here: it starts with an empty environment in a fresh
folder, gets its input, may run for so long, and is killed; of what it prints a bounded part is read.

It needs Linux on x86_64 or aarch64, with system-call filters. What it has of the two ways to take
the network away is tried out before the first use, by a connection that must fail.
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

from reward.api import RewardUnavailable
from reward.functions import confined
from servicekit.errors import Fatal

log = logging.getLogger(__name__)

INSIDE = Path(confined.__file__)
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
MAX_REPORT = 1 << 20
"""Bytes that a program may report; one that writes more is killed."""
TAIL = 2_000
PROBE_LIMIT = 30.0
PROBE = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.stdin.readline())), timeout=5)
except OSError:
    print("unreachable")
"""


class SandboxUnavailable(Fatal):
    """This machine cannot run code that nobody trusts."""


@dataclass(frozen=True)
class Finished:
    report: bytes
    """What the program wrote to its first standard output, before code could redirect it."""
    tail: str
    """The end of all else that was printed."""
    status: int | None
    """The exit status, negative for a signal; None when its time was up or it reported too much."""


@dataclass(frozen=True)
class Sandbox:
    """Made by `open_sandbox`, which finds out what this machine can do."""

    limit_s: float
    memory_mb: int
    file_mb: int = 16
    namespace: bool = True
    seccomp: bool = True
    landlock: bool = True

    async def run(self, program: Path, given: bytes) -> Finished:
        """Runs the program, which can read `given` from its standard input."""
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="steplog-sandbox-")
        try:
            # A file that no name leads to: the limit on file sizes ends a flood.
            with tempfile.TemporaryFile() as output:
                return await self._run(program, given, folder, output)
        finally:
            await asyncio.to_thread(_remove, folder)

    async def _run(self, program: Path, given: bytes, folder: str, output: IO[bytes]) -> Finished:
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
                in_time = await _talk(process, given, report)
                if in_time:
                    await process.wait()
        except TimeoutError:
            in_time = False
        finally:
            # It can start no other process, so this is the end of all that it began.
            with suppress(ProcessLookupError):
                process.kill()
            status = await process.wait()
        return _finished(bytes(report), _tail(output), status if in_time else None)

    def _command(self, program: Path, folder: str) -> list[str]:
        asked = {
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
        return [sys.executable, "-s", "-P", "-B", str(INSIDE), json.dumps(asked)]


def open_sandbox(limit_s: float, memory_mb: int, network: str = "") -> Sandbox:
    """A sandbox that was seen to work. `network` asks for one way to do without it, else both are
    taken where they exist: `namespace` or `seccomp`."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in confined.CALLS:
        raise SandboxUnavailable(
            f"code can be run only on Linux on {' or '.join(confined.CALLS)}, and this is "
            f"{sys.platform} on {machine}"
        )
    sandbox = Sandbox(limit_s, memory_mb, landlock=_has_landlock())
    ways = {
        "": [sandbox, replace(sandbox, namespace=False)],
        "namespace": [replace(sandbox, seccomp=False)],
        "seccomp": [replace(sandbox, namespace=False)],
    }
    troubles = []
    for way in ways[network]:
        trouble = probe(way)
        if trouble is None:
            return way
        troubles.append(trouble)
    raise SandboxUnavailable(
        "code cannot be run without network here: neither a network namespace nor a seccomp filter "
        f"works ({'; '.join(troubles)})"
    )


def _has_landlock() -> bool:
    if confined.landlock_version() > 0:
        return True
    if os.geteuid() == 0:
        raise SandboxUnavailable(
            "as root, code can be run only where the kernel has Landlock: run the worker as a user "
            "who owns nothing of value"
        )
    log.warning("the kernel has no Landlock: code can read and write what this user can")
    return False


def probe(sandbox: Sandbox) -> str | None:
    """What is wrong with a sandbox: it does not start, or it reaches a port of this machine."""
    folder = tempfile.mkdtemp(prefix="steplog-sandbox-")
    program = Path(folder) / "probe.py"
    program.write_text(PROBE)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            done = subprocess.run(
                sandbox._command(program, folder),
                input=str(server.getsockname()[1]).encode(),
                capture_output=True,
                cwd=folder,
                env=_environment(folder),
                timeout=PROBE_LIMIT,
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


async def _talk(process: asyncio.subprocess.Process, given: bytes, report: bytearray) -> bool:
    """Whether the report came to its end within what it may be."""
    assert process.stdin is not None and process.stdout is not None
    writing = asyncio.create_task(_write(process.stdin, given))
    try:
        while data := await process.stdout.read(1 << 16):
            report += data
            if len(report) > MAX_REPORT:
                return False
        return True
    finally:
        writing.cancel()


async def _write(stream: asyncio.StreamWriter, given: bytes) -> None:
    with suppress(ConnectionError):  # it need not read
        stream.write(given)
        await stream.drain()
        stream.close()


def _finished(report: bytes, tail: str, status: int | None) -> Finished:
    if not report.startswith(confined.READY):
        # Nothing of the program ran: this says something of the machine, and not of the code.
        raise RewardUnavailable(f"the sandbox did not start: {tail or 'no time was left'}")
    return Finished(report.removeprefix(confined.READY), tail, status)


def _tail(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL))
    return output.read(TAIL).decode(errors="replace").strip()


def _environment(folder: str) -> dict[str, str]:
    """A fixed seed of hashes: what is right once is right again. One thread for libraries that
    would start one for each core, since each takes from the memory."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _readable() -> list[str]:
    """Python and its libraries, of this environment."""
    own = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()]
    return sorted({*SYSTEM, *own, *(os.path.realpath(path) for path in own)})


def _remove(folder: str) -> None:
    """Also folders that the code locked. It is dead: nothing changes under our hands."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(0o700)
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError) as error:
        log.warning("%s stays behind: %s", folder, error)
