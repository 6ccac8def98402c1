"""`Popen` and `run` as in `subprocess`, for Python programs that tests start.

Inside a pytest run the process is forked from a server that has the third-party packages loaded
already (tests/fork_server.py), which saves two seconds of CPU for every gateway and more than ten for
every trainer. It has its own argv, environment, working directory and streams, and is killed and waited
for like any other. Outside of pytest (the bench), and for anything that is not plain Python, it is what
`subprocess` starts.
One test per command starts it by `exec`: tests/steplog/test_commands_by_exec.py.
"""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.fork_server import CODE, LENGTH, Request

RUN_FOLDER = "PYTEST_RUN_FOLDER"
"""The variable with the folder that all workers of a pytest run share."""
START_LIMIT_S = 600.0
POLL_S = 0.02
ROOT = Path(__file__).parents[1]
STEPLOG = str(Path(sys.executable).with_name("steplog"))
LIGHT = (
    *("aiohttp", "aiokafka", "asyncio", "concurrent.futures.process", "confluent_kafka.admin"),
    *("confluent_kafka.schema_registry", "fastapi", "fastavro", "httptools", "importlib.metadata"),
    *("isal.igzip_threaded", "jinja2.sandbox", "jsonschema", "math_verify", "msgspec"),
    *(
        "multiprocessing.spawn",
        "numpy",
        "openai",
        "openai.resources.chat",
        "openai.types.responses",
    ),
    *("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    *("prometheus_client", "pydantic", "rich.live", "simdjson", "tokenizers", "transformers"),
    *("transformers.models.auto.tokenization_auto", "uvicorn.lifespan.on", "uvloop", "xxhash"),
    *("uvicorn.protocols.http.httptools_impl", "yaml"),
)
TORCH = ("torch", *LIGHT, "transformers.models.qwen2.modeling_qwen2", "safetensors.torch")
ATROPOS = (*("torch", "atroposlib.envs.base", "atroposlib.envs.server_handling.server_manager"),)
NEED_TORCH = (["train"], ["export"], ["demo"], ["replay", "step"])


class Preload(NamedTuple):
    """The packages that a fork server has imported."""

    name: str
    modules: tuple[str, ...]


PRELOADS = {
    name: Preload(name, modules)
    for name, modules in {"light": LIGHT, "torch": TORCH, "atropos": ATROPOS}.items()
}


class Popen(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose process is the fork server's child, and not ours."""

    _server: socket.socket | None = None

    def __init__(self, args: Any, *, preload: str = "", **options: Any) -> None:
        argv = _python_argv(args) if RUN_FOLDER in os.environ else None
        self._argv = argv
        self._preload = preload or _preload_for(argv or [])
        super().__init__(args, **options)

    def _execute_child(self, *arguments: Any) -> None:
        _, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *streams = arguments[:16]
        *_, umask, start_new_session, process_group = arguments[16:]
        special = (
            executable or preexec_fn or pass_fds or shell or umask != -1 or process_group != -1
        )
        if self._argv is None or special:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        request = Request(
            argv=self._argv,
            cwd=os.fspath(cwd or Path.cwd()),
            env=dict(os.environ if env is None else env),
            start_new_session=bool(start_new_session),
            blocked_signals=[
                int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            ],
        )
        p2cread, _, _, c2pwrite, _, errwrite = streams
        inherited = enumerate((p2cread, c2pwrite, errwrite))
        self._server = _connect(PRELOADS[self._preload])
        body = json.dumps(request).encode()
        try:
            fds = [number if stream == -1 else stream for number, stream in inherited]
            socket.send_fds(self._server, [LENGTH.pack(len(body))], fds)
            self._server.sendall(body)
            self.pid = _receive_code(self._server)
            self._child_created = True
        finally:
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._server is None:
            polled: int | None = super()._internal_poll(*arguments, **options)  # type: ignore[misc]
            return polled
        return self._wait_for_code(0)

    def _wait(self, timeout: float | None) -> int:
        if self._server is None:
            waited: int = super()._wait(timeout)  # type: ignore[misc]
            return waited
        code = self._wait_for_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _wait_for_code(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._server is not None:
            if not _is_readable(self._server, timeout):
                return None
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    self.returncode = _receive_code(self._server)
                    self._server.close()
        return self.returncode


def run(
    args: Any,
    *,
    input: str | bytes | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


@contextmanager
def shared_run_folder() -> Iterator[None]:
    """For the process that pytest was started as. Its xdist workers inherit the variable."""
    with tempfile.TemporaryDirectory(prefix="pytest-run-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "owner").write_text(str(os.getpid()))
        os.environ[RUN_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[RUN_FOLDER]


@contextmanager
def run_folder(purpose: str) -> Iterator[Path]:
    """The folder that the workers of this pytest run share; one at a time is in here for a purpose."""
    folder = Path(os.environ[RUN_FOLDER])
    with (folder / f"{purpose}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _python_argv(args: Any) -> list[str] | None:
    """What follows the interpreter in a command line; None when it is no plain Python program."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [os.fspath(word) for word in args]
    if words[0] == STEPLOG:
        return words
    if words[0] == sys.executable and (words[1] in ("-m", "-c") or not words[1].startswith("-")):
        return words[1:]
    return None


def _preload_for(argv: list[str]) -> str:
    needs_torch = any(argv[1 : 1 + len(words)] == words for words in NEED_TORCH)
    return "torch" if needs_torch and argv[0] == STEPLOG else "light"


def _connect(preload: Preload) -> socket.socket:
    with run_folder(preload.name) as folder:
        address = folder / f"{preload.name}.socket"
        if not address.exists():
            _start_server(preload, folder, address)
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(address))
    return server


def _start_server(preload: Preload, folder: Path, address: Path) -> None:
    owner = (folder / "owner").read_text()
    command = [sys.executable, "-m", "tests.fork_server", str(address), owner, *preload.modules]
    log = folder / f"{preload.name}.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # numpy would start threads
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + START_LIMIT_S
    while not address.exists():
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(POLL_S)
    server.returncode = 0  # it ends with the run; nobody waits for it


def _is_readable(connection: socket.socket, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if timeout is None else max(0, timeout) * 1000))


def _receive_code(server: socket.socket) -> int:
    received = server.recv(CODE.size, socket.MSG_WAITALL)
    if len(received) < CODE.size:
        raise AssertionError("the fork server has ended")
    (code,) = CODE.unpack(received)
    return int(code)
