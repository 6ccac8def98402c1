"""Several engines: who gets a call, and what becomes of it when one of them fails."""

import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.affinity import CacheAffinity
from gateway.engines.engine import Engine
from pool import topics
from pool.connection import Connection
from pool.topics import POLICY
from schemas import PolicyVersion
from schemas.records import Phase
from steplog.kafka import local_kafka
from tests.gateway.client import (
    HELLO,
    RETRY,
    TOOLS,
    Streaming,
    call,
    chat,
    error,
    eventually,
    in_background,
    only_step,
    response,
    said,
    steps,
    text,
)
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine, running_stub
from tests.pool.log import write

pytestmark = pytest.mark.broker

NO_SESSION: Any = None
IMPATIENT_S = 4
"""After so long, one of the gateways gives up an engine that hangs, and waiting for one. The other
takes its time: what it is asked may be answered slowly, on a busy machine."""


class Fleet:
    """Two engines behind a gateway, and the trainer's part of the log."""

    def __init__(self, connection: Connection, file: Path, stack: ExitStack) -> None:
        self.connection = connection
        self.file = file
        self.gateway: RunningGateway
        self.impatient: RunningGateway
        self._stack = stack
        self._version = 0
        self.one = stack.enter_context(running_stub(tokens=8))
        self.two = stack.enter_context(running_stub(tokens=8))

    @property
    def both(self) -> tuple[StubEngine, StubEngine]:
        return self.one, self.two

    def train(self, live: bool = True) -> str:
        """The trainer makes a version; gives its label."""
        self._version += 1
        phases: tuple[Phase, ...] = ("opened", "live") if live else ("opened",)
        records = [
            PolicyVersion(run="default", incarnation=1, version=self._version, phase=phase)
            for phase in phases
        ]
        write(self.connection, POLICY, records)
        return f"1.{self._version}"

    def use(self, *engines: StubEngine) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text("# engines\n" + "".join(f"{engine.url}/\n" for engine in engines))
        fresh.replace(self.file)  # the gateway must not read half of it

    def usable(self) -> int:
        return usable(self.gateway)

    def make_well(self) -> None:
        self.use(*self.both)
        for engine in self.both:
            engine.reset(f"1.{self._version}")
        eventually(lambda: self.usable() == 2)
        for gateway in (self.gateway, self.impatient):
            eventually(partial(self._serves_with_two, gateway))

    def _serves_with_two(self, gateway: RunningGateway) -> bool:
        """Serves a call; if the second engine has got it, the gateway uses both."""
        before = len(self.two.requests())
        prompt_uid = self.prompt_of(self.two)
        assert chat(gateway, f"turn-{uuid.uuid4().hex}", prompt_uid).status == 200
        return len(self.two.requests()) > before

    def prompt_of(self, engine: StubEngine) -> str:
        """A new prompt_uid whose first calls go to this engine."""
        urls = [Engine(each.url, NO_SESSION) for each in self.both]
        while True:
            prompt_uid = f"prompt-{uuid.uuid4().hex[:12]}"
            if next(CacheAffinity(prompt_uid).order(urls)).url == engine.url:
                return prompt_uid

    def revive(self, dead: StubEngine) -> None:
        again = self._stack.enter_context(running_stub(tokens=8, port=dead.port))
        self.one, self.two = (again if e is dead else e for e in self.both)

    def counts(self) -> list[int]:
        return [len(engine.requests()) for engine in self.both]


def usable(gateway: RunningGateway) -> int:
    return int(gateway.metric("gateway_usable_engines"))


@pytest.fixture(scope="module")
def fleet_(
    kafka: local_kafka.Broker, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    prefix = f"engines-{uuid.uuid4().hex[:8]}."
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=prefix)
    topics.create(connection, partitions=2)
    file = tmp_path_factory.mktemp("fleet") / "engines"
    options = ["--engines-file", str(file)]
    limits = [f"--engine-timeout-s={IMPATIENT_S}", f"--engine-wait-s={IMPATIENT_S}"]
    with ExitStack() as stack:
        fleet = Fleet(connection, file, stack)
        version = fleet.train()
        for engine in fleet.both:
            engine.set_version(version)
        fleet.use(*fleet.both)
        fleet.gateway, fleet.impatient = (
            stack.enter_context(running_gateway(connection, [], tokenizer, *options, *more))
            for more in ([], limits)
        )
        yield fleet


@pytest.fixture
def fleet(fleet_: Fleet) -> Fleet:
    fleet_.make_well()
    return fleet_


@pytest.fixture
def gateway(fleet: Fleet) -> RunningGateway:
    return fleet.gateway


@pytest.fixture
def prompt_uid(fleet: Fleet) -> str:
    return fleet.prompt_of(fleet.one)


def test_a_group_goes_to_one_engine_until_that_has_much_more_to_do(
    fleet: Fleet, gateway: RunningGateway, prompt_uid: str
) -> None:
    """Nine go to the first engine; from then on it has eight calls more than the other."""
    before = fleet.counts()
    for engine in fleet.both:
        engine.script([said("slow", hold=0)] * 12)
    with in_background() as submit:
        sent = [submit(chat, gateway, f"{prompt_uid}-{n}", prompt_uid) for n in range(12)]
        eventually(lambda: sum(fleet.counts()) == sum(before) + 12)
        for engine in fleet.both:
            engine.release()
        assert {one.result().status for one in sent} == {200}
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [10, 2]


def test_a_trajectory_stays_with_its_engine(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    """The first one is gone for a while, so that the second gets the trajectory, and keeps it."""
    before = fleet.counts()
    fleet.one.set_health(503)
    eventually(lambda: fleet.usable() == 1)
    chat(gateway, uid, prompt_uid)
    fleet.one.set_health(200)
    eventually(lambda: fleet.usable() == 2)
    for _ in range(4):
        chat(gateway, uid, prompt_uid)
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [0, 5]


@pytest.mark.parametrize(
    ("fault", "stream"),
    [
        ("before", False),
        ("before", True),
        ("status:500", False),
        ("status:500", True),
        ("status:404", False),
        ("garbage", False),
        ("garbage", True),
        ("error", False),
        ("cut", False),
        ("logprob_count", False),
    ],
)
def test_a_call_that_an_engine_failed_is_answered_by_the_other(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str, fault: str, stream: bool
) -> None:
    before = fleet.counts()
    fleet.one.script([said("bad", fault=fault)])
    fleet.two.script([said("good")])
    reply = chat(gateway, uid, prompt_uid, stream=stream)
    assert reply.status == 200
    assert "error" not in reply.body
    assert response(only_step(gateway, uid)) == said("good")["ids"]
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_on_which_an_engine_hangs_is_answered_by_the_other(
    fleet: Fleet, uid: str, prompt_uid: str, stream: bool
) -> None:
    eventually(lambda: usable(fleet.impatient) == 2)
    before = fleet.counts()
    fleet.one.script([said("bad", fault="hang")])
    fleet.two.script([said("good")])
    reply = chat(fleet.impatient, uid, prompt_uid, stream=stream)
    assert reply.status == 200
    assert "error" not in reply.body
    assert response(only_step(fleet.impatient, uid)) == said("good")["ids"]
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [1, 1]


@pytest.mark.parametrize("fault", ["cut", "error", "logprob_count"])
def test_after_a_byte_was_sent_a_failure_is_an_error_event_and_no_step(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str, fault: str
) -> None:
    before = fleet.counts()
    fleet.one.script([said("abcdefgh", fault=fault, chunk_delay=0.01)])
    path = f"/{uid}/{prompt_uid}/v1/chat/completions"
    *events, last = Streaming(gateway, path, {"messages": HELLO, "stream": True}).events()
    told = "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events)
    assert told and "abcdefgh".startswith(told)
    assert json.loads(last)["error"]["type"] == "server_error"
    assert not any(json.loads(e)["choices"][0]["finish_reason"] for e in events)
    assert steps(gateway, uid) == []
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [1, 0]


def test_an_engine_that_aborts_an_answer_has_failed_it(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    fleet.one.script([said("half", finish_reason="abort")])
    fleet.two.script([said("good")])
    assert text(chat(gateway, uid, prompt_uid)) == "good"
    assert len(steps(gateway, uid)) == 1


def test_an_engine_that_dies_under_a_call_is_replaced(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    before = fleet.counts()[0]
    dead = fleet.one
    dead.script([said("never", delay=30)])
    fleet.two.script([said("good")])
    with in_background() as submit:
        sent = submit(chat, gateway, uid, prompt_uid)
        eventually(lambda: fleet.counts()[0] > before)
        dead.kill()
        assert text(sent.result()) == "good"
    assert len(steps(gateway, uid)) == 1
    eventually(lambda: fleet.usable() == 1)
    fleet.revive(dead)


def test_an_answer_is_rebuilt_though_the_engine_that_is_asked_to_parse_has_died(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    fleet.one.script([said(call("look", '{"at":"home"}'))])
    first = chat(gateway, uid, prompt_uid, tools=TOOLS)
    dead = fleet.one
    dead.kill()
    again = chat(gateway, uid, prompt_uid, tools=TOOLS, headers=RETRY)
    assert (again.status, again.body["id"]) == (200, first.body["id"])
    fleet.revive(dead)


def test_when_every_engine_fails_the_call_is_502_and_nothing_is_recorded(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    for engine in fleet.both:
        engine.script([said("bad", fault="status:500")] * 4)
    reply = chat(gateway, uid, prompt_uid)
    assert reply.status == 502
    assert "the script says so" in error(reply)["message"]
    assert steps(gateway, uid) == []


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_the_clients_mistake(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str, stream: bool
) -> None:
    before = fleet.counts()
    fleet.one.script([said("x", fault="status:400")])
    reply = chat(gateway, uid, prompt_uid, stream=stream)
    assert reply.status == 400
    assert "the script says so" in error(reply)["message"]
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [1, 0]
    assert fleet.usable() == 2
    assert steps(gateway, uid) == []


def test_an_engine_that_is_not_healthy_gets_no_calls(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    fleet.one.set_health(503)
    eventually(lambda: fleet.usable() == 1)
    before = fleet.counts()
    for n in range(3):
        assert chat(gateway, f"{uid}-{n}", prompt_uid).status == 200
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [0, 3]


def test_the_list_of_engines_may_change_at_run_time(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    with running_stub(tokens=8) as third:
        third.set_version("1.1")
        fleet.use(third)
        eventually(lambda: fleet.usable() == 1)
        eventually(lambda: chat(gateway, uid, prompt_uid).status == 200 and third.requests())
        before = fleet.counts()
        chat(gateway, uid, prompt_uid)
        assert fleet.counts() == before
        fleet.use(*fleet.both)
        eventually(lambda: fleet.usable() == 2)
    assert chat(gateway, uid, prompt_uid).status == 200


# Weights


def test_a_version_that_is_being_sent_out_changes_nothing_yet(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    newest = fleet.train(live=False)
    fleet.two.set_version(newest)
    before = fleet.counts()
    for n in range(2):
        assert chat(gateway, f"{uid}-{n}", prompt_uid).status == 200
    assert fleet.counts() != before
    assert fleet.usable() == 2


def test_an_engine_with_old_weights_gets_no_traffic(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    fleet.two.set_version(fleet.train())
    eventually(lambda: fleet.usable() == 1)
    before = fleet.counts()
    for n in range(3):
        assert chat(gateway, f"{uid}-{n}", prompt_uid).status == 200
    assert [now - then for now, then in zip(fleet.counts(), before, strict=True)] == [0, 3]


def test_the_cache_of_old_weights_is_not_found_under_new_ones(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    newest = fleet.train()
    eventually(lambda: fleet.usable() == 0)  # the gateway knows of it
    for engine in fleet.both:
        engine.set_version(newest)
    eventually(lambda: fleet.usable() == 2)
    chat(gateway, uid, prompt_uid, [{"role": "user", "content": uid}])
    bodies = [body for engine in fleet.both for body in engine.requests()]
    (sent,) = (b for b in bodies if uid.encode() in bytes(i for i in b["token_ids"] if i < 256))
    assert sent["cache_salt"] == newest


def test_a_call_waits_for_an_engine_with_allowed_weights(
    fleet: Fleet, gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    newest = fleet.train()
    eventually(lambda: fleet.usable() == 0)
    assert gateway.get("/ready").status == 503
    with in_background() as submit:
        sent = submit(chat, gateway, uid, prompt_uid)
        fleet.two.set_version(newest)
        assert sent.result().status == 200
    assert len(steps(gateway, uid)) == 1


def test_without_an_engine_in_time_the_call_is_503_with_retry_after(
    fleet: Fleet, uid: str, prompt_uid: str
) -> None:
    fleet.train()
    eventually(lambda: usable(fleet.impatient) == 0)
    reply = chat(fleet.impatient, uid, prompt_uid)
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) > 0
    assert "engine" in error(reply)["message"]
    assert steps(fleet.impatient, uid) == []
