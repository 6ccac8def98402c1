"""A reward worker as its users run it, and trajectories for it."""

import json
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiokafka import ConsumerRecord

from pool.connection import Connection
from pool.readers.end_offsets import wait_until_readable
from pool.topics import DEAD_LETTERS, REWARDED
from schemas import Record, Step, TrajectoryEnd
from tests import processes
from tests.conftest import free_port
from tests.pool.log import messages, records
from tests.pool.records import end, step
from tests.steplog.command import STEPLOG, reaching
from tests.tiny_model import EOS

LIMIT_S = 120.0
POLL_S = 0.05


class RunningWorker:
    def __init__(self, port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.log = log

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


@contextmanager
def running_worker(
    connection: Connection, *options: str, slot: str = "0"
) -> Iterator[RunningWorker]:
    port = free_port()
    command = [STEPLOG, "reward", *reaching(connection), "--port", str(port), "--slot", slot]
    with tempfile.NamedTemporaryFile(prefix="reward-", suffix=".log", delete=False) as output:
        process = processes.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT)
    worker = RunningWorker(port, process, Path(output.name))
    try:
        yield worker
        worker.log.unlink()
    finally:
        worker.kill()


def answered(uid: str, text: str, prompt: str = "p", **fields: Any) -> list[Record]:
    """A trajectory of one Step that says `text`, with metadata and so on for its End."""
    ids = [*text.encode(), EOS]
    metadata = json.dumps(fields.pop("metadata", {}))
    return [
        step(f"{uid}-0", uid, prompt, response=ids, metadata=metadata),
        end(uid, prompt, steps=1, metadata=metadata, **fields),
    ]


def ends(connection: Connection, topic: str = REWARDED) -> dict[str, TrajectoryEnd]:
    """The Ends in `rewarded`, by trajectory; each must be there once."""
    found = [r for r in records(connection, topic) if isinstance(r, TrajectoryEnd)]
    by_uid = {record.trajectory_uid: record for record in found}
    assert len(by_uid) == len(found), "an End was written twice"
    return by_uid


def dead_letters(connection: Connection) -> list[ConsumerRecord]:
    """Also those of a transaction whose other records can be read already: its markers come to one
    topic after the other."""
    wait_until_readable(connection, DEAD_LETTERS)
    return messages(connection, DEAD_LETTERS)


def steps(connection: Connection) -> list[Step]:
    return [r for r in records(connection, REWARDED) if isinstance(r, Step)]


def wait_for(what: Callable[[], Any], worker: RunningWorker | None = None) -> Any:
    """Polls until it is true; says the worker's log when it never is."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if worker is not None and worker.process.poll() is not None:
            break
        if found := what():
            return found
        time.sleep(POLL_S)
    told = worker.log.read_text()[-3000:] if worker is not None else ""
    raise AssertionError(f"it did not happen\n{told}")


def wait_for_ends(
    connection: Connection, count: int, worker: RunningWorker, topic: str = REWARDED
) -> dict[str, TrajectoryEnd]:
    def enough() -> dict[str, TrajectoryEnd] | None:
        found = ends(connection, topic)
        return found if len(found) >= count else None

    found: dict[str, TrajectoryEnd] = wait_for(enough, worker)
    return found
