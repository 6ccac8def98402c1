"""A gateway as its users run it: the `steplog gateway` command, in a process of its own."""

import json
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pool.connection import Connection
from pool.topics import STEPS
from schemas import Position, Record, Step
from tests import processes
from tests.conftest import free_port
from tests.pool.log import messages
from tests.steplog.command import STEPLOG, reaching

if TYPE_CHECKING:  # they take seconds to import, and most tests ask without them
    import anthropic
    import openai

START_LIMIT_S = 60.0
POLL_S = 0.05


class Reply(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]


class Found(NamedTuple):
    place: Position
    record: Record


class RunningGateway:
    def __init__(
        self, port: int, process: "subprocess.Popen[bytes]", connection: Connection, log: Path
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.process = process
        self.connection = connection
        self.log = log

    def base(self, trajectory_uid: str, prompt_uid: str) -> str:
        return f"{self.url}/{trajectory_uid}/{prompt_uid}/v1"

    def openai(self, trajectory_uid: str, prompt_uid: str, **options: Any) -> "openai.OpenAI":
        """The real client, without retries unless a test asks for them."""
        import openai

        options = {"api_key": "none", "max_retries": 0, **options}
        return openai.OpenAI(base_url=self.base(trajectory_uid, prompt_uid), **options)

    def anthropic(
        self, trajectory_uid: str, prompt_uid: str, **options: Any
    ) -> "anthropic.Anthropic":
        import anthropic

        options = {"api_key": "none", "max_retries": 0, **options}
        base = self.base(trajectory_uid, prompt_uid).removesuffix("/v1")
        return anthropic.Anthropic(base_url=base, **options)

    def post(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, limit: float = 60
    ) -> Reply:
        """Any status is an answer. `body` may be bytes; None sends no body at all."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(
            self._whole(path), data if body is not None else b"", sent, method="POST"
        )
        return _reply(request, limit)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return _reply(urllib.request.Request(self._whole(path), headers=headers or {}), 60)

    def _whole(self, path: str) -> str:
        return path if path.startswith("http") else self.url + path

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = str(self.get("/metrics").body).splitlines()
        samples = [line for line in lines if line.partition("{")[0].split(" ")[0] == name]
        fitting = [line for line in samples if all(label in line for label in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in fitting)

    def log_of(self, trajectory_uid: str, topic: str = STEPS) -> list[Found]:
        """The records of a trajectory, in their order."""
        codec = self.connection.codec()
        found = [
            Found(Position(partition=m.partition, offset=m.offset), codec.decode(m.value))
            for m in messages(self.connection, topic)
        ]
        return [f for f in found if getattr(f.record, "trajectory_uid", None) == trajectory_uid]

    def steps(self, trajectory_uid: str) -> list[Step]:
        return [f.record for f in self.log_of(trajectory_uid) if isinstance(f.record, Step)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


def _reply(request: urllib.request.Request, limit: float) -> Reply:
    try:
        with urllib.request.urlopen(request, timeout=limit) as response:
            return Reply(response.status, _content(response.read()), dict(response.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, _content(error.read()), dict(error.headers))


def _content(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


@contextmanager
def running_gateway(
    connection: Connection,
    engines: Sequence[str],
    tokenizer: Path,
    *options: str,
    port: int = 0,
    wait: bool = True,
) -> Iterator[RunningGateway]:
    """Until the end, or until the test has killed it. `wait`: returns when it is ready."""
    port = port or free_port()
    command = [STEPLOG, "gateway", *reaching(connection), "--port", str(port)]
    command += ["--tokenizer", str(tokenizer), *options]
    command += ["--engines", ",".join(engines)] if engines else []
    with tempfile.NamedTemporaryFile(prefix="gateway-", suffix=".log", delete=False) as output:
        process = processes.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    gateway = RunningGateway(port, process, connection, Path(output.name))
    try:
        if wait:
            wait_until_ready(gateway)
        yield gateway
        gateway.log.unlink()
    finally:
        gateway.kill()


def wait_until_ready(gateway: RunningGateway) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while gateway.process.poll() is None and time.monotonic() < deadline:
        try:
            if gateway.get("/ready").status == 200:
                return
        except OSError:
            pass
        time.sleep(POLL_S)
    raise AssertionError(f"the gateway did not get ready:\n{gateway.log.read_text()[-3000:]}")
