"""Several gateway processes behind one address, and trajectories that are served by all of them."""

import http.client
import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pool import topics
from pool.connection import Connection
from pool.core.trajectories import step_of
from pool.topics import TRAJECTORIES
from schemas import Position, Registration, Step
from steplog.kafka import local_kafka
from tests.conftest import free_port
from tests.gateway.echo_engine import running_echo
from tests.gateway.load import Attempt, Sent, wait_until
from tests.gateway.recorded import Recorded
from tests.gateway.running import Reply, RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PROCESSES = 3
CALLS = 60
SOON = 60.0
PATIENCE = 60.0


@pytest.fixture(scope="module")
def shared(kafka: local_kafka.Broker) -> Connection:
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"pr-{uuid.uuid4().hex[:8]}.")
    topics.create(connection)
    return connection


@pytest.fixture(scope="module")
def echo() -> Iterator[StubEngine]:
    with running_echo(delay=1.0) as engine:
        yield engine


@pytest.fixture(scope="module")
def processes(
    shared: Connection, echo: StubEngine, tokenizer: Path
) -> Iterator[Sequence[RunningGateway]]:
    """On one port."""
    port = free_port()
    with ExitStack() as running:

        def start() -> RunningGateway:
            one = running_gateway(
                shared, [echo.url], tokenizer, "--reuse-port", port=port, wait=False
            )
            return running.enter_context(one)

        started = [start() for _ in range(PROCESSES)]
        for gateway in started:
            door_to(gateway).close()
        yield started


class Door:
    """A connection, and so one of the processes: the kernel chooses it when the connection opens."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"content-type": "application/json"} | headers)
        answer = self._connection.getresponse()
        content = answer.read()
        kind = answer.headers.get_content_type()
        told = json.loads(content) if kind == "application/json" else content.decode()
        return Reply(answer.status, told, dict(answer.headers))

    def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        return self.ask("POST", path, body, **headers)

    def leads_to(self, gateway: RunningGateway) -> bool:
        port = self._connection.sock.getsockname()[1]
        held = psutil.Process(gateway.process.pid).net_connections("inet")
        return any(connection.raddr and connection.raddr.port == port for connection in held)

    def is_ready(self) -> bool:
        return self.ask("GET", "/ready").status == 200

    def close(self) -> None:
        self._connection.close()


def door_to(gateway: RunningGateway) -> Door:
    """Tries until the kernel has chosen this one, and it is ready."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        door = Door(gateway.port)
        try:
            if door.is_ready() and door.leads_to(gateway):
                return door
        except OSError:
            time.sleep(0.05)
        door.close()
    raise AssertionError(f"no way to it:\n{gateway.log.read_text()[-3000:]}")


@pytest.fixture
def three(processes: Sequence[RunningGateway]) -> Iterator[list[Door]]:
    opened = [door_to(gateway) for gateway in processes]
    yield opened
    for door in opened:
        door.close()


def chat(text: str) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": f"[[{text}]]"}]}


def test_a_registration_holds_in_every_process(
    three: list[Door], shared: Connection, uid: str
) -> None:
    base = f"/{uid}/{uid}-prompt/v1"
    about = {"channel": "val", "metadata": {"level": 3}, "group_size": 5}
    assert three[0].post(f"{base}/register_trajectory", about).status == 200
    for number, door in enumerate(three):
        assert door.post(f"{base}/chat/completions", chat(f"{uid}.{number}")).status == 200
    steps = steps_of(shared, uid)
    assert len(steps) == PROCESSES
    told = {(step.channel, step.metadata, step.group_size) for step in steps}
    assert told == {("val", '{"level":3}', 5)}


def test_a_registration_that_changes_holds_in_the_other_processes_soon(
    three: list[Door], shared: Connection, uid: str
) -> None:
    base = f"/{uid}/{uid}-prompt/v1"
    for number, door in enumerate(three):
        assert door.post(f"{base}/chat/completions", chat(f"{uid}.{number}")).status == 200
    assert three[1].post(f"{base}/register_trajectory", {"channel": "val"}).status == 200

    def holds() -> bool:
        for number, door in enumerate(three):
            door.post(f"{base}/chat/completions", chat(f"{uid}.later.{number}"))
        return {step.channel for step in steps_of(shared, uid)[-PROCESSES:]} == {"val"}

    wait_until(holds, SOON)


def test_a_trajectory_that_one_process_completes_is_closed_in_the_others_soon(
    three: list[Door], shared: Connection, uid: str
) -> None:
    base = f"/{uid}/{uid}-prompt/v1"
    for number, door in enumerate(three):
        assert door.post(f"{base}/chat/completions", chat(f"{uid}.{number}")).status == 200
    assert three[0].post(f"{base}/complete_trajectory", {"reward": 1.0}).status == 200
    for door in three:
        late = partial(door.post, f"{base}/chat/completions", chat(f"{uid}.late"))
        wait_until(lambda late=late: late().status == 409, SOON)  # type: ignore[misc]
        assert door.post(f"{base}/complete_trajectory", {"reward": 1.0}).status == 200
        assert door.post(f"{base}/complete_trajectory", {"reward": 0.0}).status == 409
    trajectory = Recorded(shared).closed[uid]
    assert trajectory.problem is None
    assert len(trajectory.steps) == PROCESSES


def test_a_marked_retry_at_another_process_gets_the_stored_answer(
    three: list[Door], shared: Connection, uid: str
) -> None:
    path = f"/{uid}/{uid}-prompt/v1/chat/completions"
    first = three[0].post(path, chat(uid))
    again = three[1].post(path, chat(uid), **{"x-stainless-retry-count": "1"})
    assert (first.status, again.status) == (200, 200)
    assert again.body["id"] == first.body["id"]
    assert again.body["choices"] == first.body["choices"]
    assert len(steps_of(shared, uid)) == 1


def test_a_marked_retry_at_a_process_that_holds_the_trajectory_gets_the_stored_answer(
    three: list[Door], shared: Connection, uid: str
) -> None:
    """The Step is one that the other process wrote after this one had read the trajectory."""
    path = f"/{uid}/{uid}-prompt/v1/chat/completions"
    for door in three[:2]:
        assert door.post(path, chat(f"{uid}.{id(door)}")).status == 200
    first = three[0].post(path, chat(uid))
    again = three[1].post(path, chat(uid), **{"x-stainless-retry-count": "1"})
    assert again.body["id"] == first.body["id"]
    assert again.body["choices"] == first.body["choices"]
    assert len(steps_of(shared, uid)) == 3


def test_processes_that_meet_a_trajectory_at_the_same_moment_agree_where_it_begins(
    three: list[Door], shared: Connection, uid: str
) -> None:
    names = [f"{uid}-{number}" for number in range(10)]
    together = threading.Barrier(PROCESSES)

    def ask(door: Door) -> list[int]:
        statuses = []
        for name in names:
            together.wait()
            path = f"/{name}/{name}-prompt/v1/chat/completions"
            statuses.append(door.post(path, chat(f"{name}.{id(door)}")).status)
        return statuses

    with ThreadPoolExecutor(PROCESSES) as agents:
        statuses = [status for told in agents.map(ask, three) for status in told]
    assert statuses == [200] * PROCESSES * len(names)
    for name in names:
        steps = places_of(shared, name)
        assert len({step.step_id for _, step in steps}) == PROCESSES
        assert newest_registration(shared, name).begins <= min(place for place, _ in steps)


def test_a_killed_process_loses_no_step_of_a_trajectory_that_three_serve(
    processes: Sequence[RunningGateway], shared: Connection, uid: str
) -> None:
    base = f"/{uid}/{uid}-prompt/v1"
    port = processes[0].port
    sent = [Sent(uid, f"[[{uid}.{number}]]", stream=False) for number in range(CALLS)]
    with ThreadPoolExecutor(CALLS) as agents:
        calls = [agents.submit(ask_until_answered, port, base, call) for call in sent]
        wait_until(lambda: sum(call.done() for call in calls) > CALLS // 4, PATIENCE)
        processes[0].kill()
        for call in calls:
            call.result(timeout=PATIENCE)
    assert completed(port, base)
    log = Recorded(shared)
    ours = {step.step_id: step for step in log.steps.values() if step.trajectory_uid == uid}
    assert all(call.step_id in ours for call in sent), "I1: an acknowledged Step is missing"
    assert len({call.step_id for call in sent}) == CALLS
    trajectory = log.closed[uid]
    assert trajectory.problem is None
    whole = {step_of(received).step_id for received in trajectory.steps}
    assert whole >= {call.step_id for call in sent}
    order = [(step_of(r).step_index, r.offset) for r in trajectory.steps]
    assert order == sorted(set(order)), "the order is not well defined"
    for asked in sent:
        # An attempt that died with its process may have left a Step, which is an orphan then.
        steps = {step.step_id for step in log.by_text[asked.text]}
        assert len(steps) <= 1 + len(asked.attempts)
        assert steps - trajectory.orphans == {asked.step_id}


def ask_until_answered(port: int, base: str, sent: Sent) -> None:
    """A fresh connection for every attempt, as the kernel likes; retries are marked."""
    retries, deadline = 0, time.monotonic() + PATIENCE
    while sent.step_id is None:
        assert time.monotonic() < deadline, sent
        door = Door(port)
        try:
            marks = {"x-stainless-retry-count": str(retries)}
            body = {"model": "default", "messages": [{"role": "user", "content": sent.text}]}
            reply = door.post(f"{base}/chat/completions", body, **marks)
            assert reply.status == 200, reply
            sent.step_id = reply.body["id"].removeprefix("chatcmpl-")
            sent.content = reply.body["choices"][0]["message"]["content"]
        except (OSError, http.client.HTTPException) as error:
            now = time.monotonic()
            sent.attempts.append(Attempt(type(error).__name__, now, now, retries > 0))
            retries += 1
            time.sleep(0.2)
        finally:
            door.close()


def completed(port: int, base: str) -> bool:
    door = Door(port)
    try:
        return door.post(f"{base}/complete_trajectory", {"reward": 1.0}).status == 200
    finally:
        door.close()


def steps_of(connection: Connection, uid: str) -> list[Step]:
    return [step for _, step in places_of(connection, uid)]


def places_of(connection: Connection, uid: str) -> list[tuple[Position, Step]]:
    found = RunningGateway(0, None, connection, Path()).log_of(uid)  # type: ignore[arg-type]
    return [(f.place, f.record) for f in found if isinstance(f.record, Step)]


def newest_registration(connection: Connection, uid: str) -> Registration:
    """What compaction leaves."""
    found = RunningGateway(0, None, connection, Path()).log_of(uid, TRAJECTORIES)  # type: ignore[arg-type]
    *_, newest = [f.record for f in found if isinstance(f.record, Registration)]
    return newest
