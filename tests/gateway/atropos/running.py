"""The Atropos server as its users run it: `steplog atropos`, in processes of its own."""

import gzip
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pool.connection import Connection
from tests import processes
from tests.conftest import free_port, kill_and_wait
from tests.steplog.command import STEPLOG, reaching

START_LIMIT_S = 60.0
POLL_S = 0.02
TRAINING = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 8,
    "max_token_len": 512,
    "checkpoint_dir": "/checkpoints",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 100,
}
ENV = {"max_token_length": 512, "desired_name": "maths", "weight": 1.0, "group_size": 4}
JSON = {"content-type": "application/json"}


class Reply(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]


class Client:
    """Speaks to any server of the API: a new connection for each request, as environments do."""

    def __init__(self, port: int, prefix: str = "") -> None:
        self.port = port
        self.prefix = prefix
        self.url = f"http://127.0.0.1:{port}{prefix}"
        self.always: dict[str, str] = {}
        """Headers of every request."""

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """`body` may be bytes. Any status is an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = headers if headers is not None else (JSON if data is not None else {})
        try:
            connection.request(method, self.prefix + path, data, self.always | sent)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        about = {name.lower(): value for name, value in response.getheaders()}
        if about.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        return Reply(response.status, _content(content), about)

    def get(self, path: str, body: Any = None) -> Any:
        return self.ask("GET", path, body).body

    def post(self, path: str, body: Any) -> Any:
        return self.ask("POST", path, body).body

    def begin(self, **training: Any) -> None:
        """A trainer that has registered and asked once."""
        self.post("/register", TRAINING | training)
        self.get("/batch")

    def join(self, **env: Any) -> int:
        joined: int = self.post("/register-env", ENV | env)["env_id"]
        return joined

    def batch_scores(self) -> list[list[float]] | None:
        """The scores of the next batch's groups, by which tests know them."""
        batch = self.get("/batch")["batch"]
        return None if batch is None else [group["scores"] for group in batch]

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def _content(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


def until(true: Callable[[], bool], limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def scored(score: float, size: int = 4, env_id: int | None = None, tokens: int = 2) -> Any:
    """A group that is known by its score."""
    rows = [list(range(tokens))] * size
    return {"tokens": rows, "masks": rows, "scores": [score] * size, "env_id": env_id}


class RunningAtropos(Client):
    def __init__(self, port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        super().__init__(port)
        self.process = process
        self.log = log
        self._handed_before = 0.0

    def reset(self) -> None:
        """As if it had just been started."""
        self.get("/reset_data")
        self._handed_before = self.metric("atropos_batches_total")

    @property
    def server(self) -> int:
        """The process that serves now."""
        (child,) = psutil.Process(self.process.pid).children()
        return int(child.pid)

    def kill_server(self, handed: int = 0) -> None:
        """When the log knows that it has handed over so many batches, since it was reset or killed
        last: one that it does not know of comes again."""
        if handed:
            known = self._handed_before + handed
            until(lambda: self.metric("atropos_batches_total") >= known)
        kill_and_wait(self.server)
        self._handed_before = 0.0

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def kill_all(self) -> None:
        """As when the machine dies."""
        if self.process.poll() is None:
            server = self.server
            self.process.kill()
            os.kill(server, signal.SIGKILL)
            self.process.wait()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                if self.ask("GET", "/ready").status == 200:
                    return
            except OSError:
                pass
            time.sleep(POLL_S)
        raise AssertionError(f"the server did not get ready:\n{self.log.read_text()[-3000:]}")


@contextmanager
def running_atropos(
    connection: Connection, *options: str, port: int = 0, wait: bool = True
) -> Iterator[RunningAtropos]:
    port = port or free_port()
    command = [STEPLOG, "atropos", *reaching(connection), "--port", str(port), *options]
    with tempfile.NamedTemporaryFile(prefix="atropos-", suffix=".log", delete=False) as output:
        process = processes.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    running = RunningAtropos(port, process, Path(output.name))
    try:
        if wait:
            running.wait_until_ready()
        yield running
        running.log.unlink()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@contextmanager
def counting(
    atropos: Client, tokenizer: Path, steps: int, log: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    """An environment of Atropos' own kind that serves for so many steps."""
    environ = os.environ | {
        "COUNTING_TOKENIZER": str(tokenizer),
        "COUNTING_STEPS": str(steps),
        "COUNTING_URL": atropos.url,
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).with_name("counting_env.py")
    with log.open("wb") as output:
        command = [sys.executable, str(script), "serve"]
        env = processes.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environ, preload="atropos"
        )
    try:
        yield env
    finally:
        env.kill()
        env.wait()
