"""A process that has imported the heavy third-party packages, and forks one child per command.

    python -m tests.fork_server SOCKET OWNER MODULE…

Most of a service's start is the import of packages that are not ours: two seconds of CPU for a
gateway. This server pays for that once per test run. Our own modules are not imported here, so every
child imports them itself, as a process that was started by `exec` would, and its metrics are its own.
Unless torch is among the modules it is hidden from children, as gateways hide it from transformers.

A client connects, sends one `Request` with its stdin, stdout and stderr, receives the pid, and later
the exit code on the same connection. The server ends when the process OWNER has ended. It has one
thread, and no Kafka client, so a fork of it is as good as a new interpreter.
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from servicekit.tokenizer import hide_torch

LENGTH = struct.Struct("!I")
CODE = struct.Struct("!i")
STANDARD_STREAMS = 3


class Request(TypedDict):
    """A Python command. `argv` begins with what follows the interpreter: `-m`, `-c` or a script."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    start_new_session: bool
    blocked_signals: list[int]


class Server:
    """The parent's side. `serve` returns in children only, with the request that each must execute."""

    def __init__(self, address: Path, owner: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._owner = os.pidfd_open(owner)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{address}.new")
        self._listener.listen(64)
        address.with_name(f"{address.name}.new").rename(address)  # it is there when it listens
        self._selector.register(self._owner, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """By pidfd: the pid, and who waits for its exit code."""

    def serve(self) -> Request:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._owner:
                    sys.exit()
                if key.fd in self._children:
                    self._report_end(key.fd)
                elif (request := self._fork_for_next_client()) is not None:
                    return request

    def _fork_for_next_client(self) -> Request | None:
        client, _ = self._listener.accept()
        try:
            request, streams = receive(client)
        except (OSError, ValueError):  # it went away, or is none of ours
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._become_child(streams)
            client.close()
            return request
        for stream in streams:
            os.close(stream)
        child = os.pidfd_open(pid)
        self._children[child] = pid, client
        self._selector.register(child, selectors.EVENT_READ)
        with suppress(OSError):
            client.sendall(CODE.pack(pid))
        return None

    def _report_end(self, child: int) -> None:
        pid, client = self._children.pop(child)
        self._selector.unregister(child)
        os.close(child)
        _, status = os.waitpid(pid, 0)
        with suppress(OSError), client:
            client.sendall(CODE.pack(os.waitstatus_to_exitcode(status)))

    def _become_child(self, streams: Sequence[int]) -> None:
        self._selector.close()
        self._listener.close()
        os.close(self._owner)
        for pidfd, (_, client) in self._children.items():
            os.close(pidfd)
            client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for stream in streams:
            os.close(stream)


def receive(client: socket.socket) -> tuple[Request, list[int]]:
    header, streams, _, _ = socket.recv_fds(client, LENGTH.size, STANDARD_STREAMS)
    (length,) = LENGTH.unpack(header)
    body = bytearray()
    while len(body) < length:
        part = client.recv(length - len(body))
        if not part:
            raise ValueError("the request is cut off")
        body += part
    request: Request = json.loads(body)
    return request, streams


def execute(request: Request) -> None:
    """What the interpreter would do with this command line; the process ends with its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    if request["start_new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _open_standard_streams()
    first, *rest = request["argv"]
    run, path, argv = _program(first, rest)
    extra = [entry for entry in request["env"].get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:1] = [path, *extra]
    sys.argv[:] = argv
    run()


def _program(first: str, rest: list[str]) -> tuple[Callable[[], Any], str, list[str]]:
    """What to run, the first entry of sys.path, and sys.argv."""
    if first == "-m":
        name, *words = rest
        return lambda: _run_module(name), str(Path.cwd()), [name, *words]
    if first == "-c":
        code, *words = rest
        return lambda: _run_code(code), "", ["-c", *words]
    script = Path(first).resolve()
    return (
        lambda: runpy.run_path(str(script), run_name="__main__"),
        str(script.parent),
        [first, *rest],
    )


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_code(code: str) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(code, "<string>", "exec"), main.__dict__)


def _open_standard_streams() -> None:
    """As the interpreter opens them: what they are connected to decides how they buffer."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def main() -> None:
    address, owner, *modules = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which will end soon
    if "torch" not in modules:
        hide_torch()
    for module in modules:
        with suppress(ImportError):  # torch and Atropos need not be installed
            importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads run after the imports; a fork would lose them"
    gc.freeze()  # collections in children would copy every page of what is imported here
    # In children this returns, and what follows is their program.
    execute(Server(Path(address), int(owner)).serve())


if __name__ == "__main__":
    main()
