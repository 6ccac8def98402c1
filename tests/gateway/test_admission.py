"""New groups wait while the trainer has enough; members of admitted groups never do."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import LEDGER, POLICY
from schemas import DecidedGroup, Decision, Member, PolicyVersion
from steplog.kafka import local_kafka
from tests.gateway.client import chat, error, eventually, in_background, said, steps
from tests.gateway.running import Reply, RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.log import write

pytestmark = pytest.mark.broker

LIMIT = 2
SIZE = 2


class Trainer:
    """Decides the groups of a gateway that admits two."""

    def __init__(self, connection: Connection, start: Callable[[], RunningGateway]) -> None:
        self.connection = connection
        self.start = start
        self.gateway = start()
        self.begun: list[tuple[str, str]] = []
        self._sequence = 0

    def begin(self, prompt_uid: str, uid: str = "") -> tuple[str, str]:
        """A member of a group makes its first call."""
        uid = uid or uuid.uuid4().hex
        assert chat(self.gateway, uid, prompt_uid).status == 200
        self.begun.append((uid, prompt_uid))
        return uid, prompt_uid

    def complete(self, uid: str, prompt_uid: str, status: str = "completed") -> None:
        path = f"/{uid}/{prompt_uid}/v1/complete_trajectory"
        assert self.gateway.post(path, {"status": status}).status == 200

    def decide(self, members: list[tuple[str, str]]) -> None:
        groups = [
            DecidedGroup(
                prompt_uid=prompt_uid,
                partition=0,
                first_offset=0,
                closed_at=0,
                verdict="train",
                members=[
                    Member(trajectory_uid=uid, verdict="train")
                    for uid, of in members
                    if of == prompt_uid
                ],
            )
            for prompt_uid in sorted({prompt_uid for _, prompt_uid in members})
        ]
        self._sequence += 1
        decision = Decision(run="default", incarnation=1, sequence=self._sequence, groups=groups)
        write(self.connection, LEDGER, [decision])

    def count(self) -> int:
        return int(self.gateway.metric("gateway_admitted_groups"))

    def empty(self) -> None:
        if self.begun:
            self.decide(self.begun)
            self.begun = []
        eventually(lambda: self.count() == 0)


@pytest.fixture(scope="module")
def trainer_(kafka: local_kafka.Broker, stub: StubEngine, tokenizer: Path) -> Iterator[Trainer]:
    prefix = f"admission-{uuid.uuid4().hex[:8]}."
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=prefix)
    topics.create(connection, partitions=2)
    options = ["--max-groups", str(LIMIT), "--group-size", str(SIZE)]
    with ExitStack() as stack:
        yield Trainer(
            connection,
            lambda: stack.enter_context(
                running_gateway(connection, [stub.url], tokenizer, *options)
            ),
        )


@pytest.fixture
def trainer(trainer_: Trainer) -> Trainer:
    """No group runs."""
    trainer_.empty()
    return trainer_


@pytest.fixture
def full(trainer: Trainer, prompt_uid: str) -> Trainer:
    """As many groups run as may: PROMPT-0 and PROMPT-1, with one member each."""
    for n in range(LIMIT):
        trainer.begin(f"{prompt_uid}-{n}")
    return trainer


def test_a_new_group_too_many_is_429_with_retry_after(
    full: Trainer, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    generated = len(stub.requests())
    reply = chat(full.gateway, uid, f"{prompt_uid}-new")
    assert reply.status == 429
    assert int(reply.headers["retry-after"]) > 0
    assert (error(reply)["type"], error(reply)["code"]) == ("rate_limit_error", "too_many_groups")
    assert len(stub.requests()) == generated
    assert steps(full.gateway, uid) == []


def test_init_of_a_new_group_too_many_is_429(full: Trainer, prompt_uid: str) -> None:
    reply = full.gateway.post("/init_trajectory", {"prompt_uid": f"{prompt_uid}-new"})
    assert reply.status == 429


def test_a_member_of_an_admitted_group_is_never_refused(full: Trainer, prompt_uid: str) -> None:
    for n in range(LIMIT):
        full.begin(f"{prompt_uid}-{n}")
        begun = full.gateway.post("/init_trajectory", {"prompt_uid": f"{prompt_uid}-{n}"})
        assert begun.status == 200
        full.begun.append((begun.body["trajectory_uid"], f"{prompt_uid}-{n}"))


def test_the_calls_of_an_admitted_trajectory_go_on(full: Trainer) -> None:
    for uid, prompt_uid in full.begun:
        assert chat(full.gateway, uid, prompt_uid).status == 200


def test_groups_that_begin_at_the_same_time_are_counted_too(
    trainer: Trainer, stub: StubEngine, prompt_uid: str
) -> None:
    """Their first calls have not ended yet."""
    stub.script([said("slow", delay=0.5)] * 6)
    with in_background() as submit:
        sent = {
            prompt: submit(chat, trainer.gateway, f"t-{prompt}", prompt)
            for prompt in (f"{prompt_uid}-{n}" for n in range(6))
        }
        statuses = {prompt: one.result().status for prompt, one in sent.items()}
    trainer.begun += [(f"t-{prompt}", prompt) for prompt, s in statuses.items() if s == 200]
    assert sorted(statuses.values()) == [200] * LIMIT + [429] * (6 - LIMIT)


def test_a_group_whose_first_call_failed_does_not_take_a_place_for_ever(
    trainer: Trainer, stub: StubEngine, prompt_uid: str
) -> None:
    """Whatever the log has of it can be completed, and then it is gone."""
    stub.script([said("x", fault="status:400")])
    assert chat(trainer.gateway, f"t-{prompt_uid}", prompt_uid).status == 400
    path = f"/t-{prompt_uid}/{prompt_uid}/v1/complete_trajectory"
    trainer.gateway.post(path, {"status": "failed"})
    trainer.decide([(f"t-{prompt_uid}", prompt_uid)])
    eventually(lambda: trainer.count() == 0)


@pytest.mark.parametrize("how", ["init", "register", "submit"])
def test_other_channels_are_exempt(full: Trainer, uid: str, prompt_uid: str, how: str) -> None:
    gateway, prompt = full.gateway, f"{prompt_uid}-val"
    if how == "init":
        begun = gateway.post("/init_trajectory", {"prompt_uid": prompt, "channel": "val"})
        assert begun.status == 200
        uid = begun.body["trajectory_uid"]
    elif how == "register":
        path = f"/{uid}/{prompt}/v1/register_trajectory"
        assert gateway.post(path, {"channel": "val"}).status == 200
    else:
        step = {"trajectory_uid": uid, "prompt_uid": prompt, "prompt_ids": [1], "response_ids": [2]}
        reply = gateway.post("/submit_steps?channel=val", {"steps": [step]})
        assert reply.status == 200, reply
    assert chat(gateway, uid, prompt).status == 200
    assert {step.channel for step in steps(gateway, uid)} == {"val"}
    assert full.count() == LIMIT


def test_a_detour_over_another_channel_is_no_way_in(
    full: Trainer, uid: str, prompt_uid: str
) -> None:
    path = f"/{uid}/{prompt_uid}-new/v1/register_trajectory"
    assert full.gateway.post(path, {"channel": "val"}).status == 200
    assert full.gateway.post(path, {"channel": "train"}).status == 429
    assert full.count() == LIMIT


def test_a_decision_makes_room(full: Trainer, uid: str, prompt_uid: str) -> None:
    first = full.begun[0]
    full.complete(*first)
    assert chat(full.gateway, uid, f"{prompt_uid}-new").status == 429
    full.decide([first])
    eventually(lambda: full.count() == LIMIT - 1)
    full.begin(f"{prompt_uid}-new", uid)


def test_a_group_that_ended_without_usable_members_makes_room(
    full: Trainer, prompt_uid: str
) -> None:
    for uid, prompt in [full.begun[0], full.begin(f"{prompt_uid}-0")]:
        full.complete(uid, prompt, "failed")
    eventually(lambda: full.count() == LIMIT - 1)
    full.begin(f"{prompt_uid}-new")


def test_a_group_that_ended_and_waits_for_its_decision_counts(
    full: Trainer, uid: str, prompt_uid: str
) -> None:
    for member, prompt in [full.begun[0], full.begin(f"{prompt_uid}-0")]:
        full.complete(member, prompt)
    assert chat(full.gateway, uid, f"{prompt_uid}-new").status == 429


@pytest.mark.slow
def test_a_restart_gives_the_same_count(full: Trainer, uid: str, prompt_uid: str) -> None:
    full.gateway.kill()
    full.gateway = full.start()
    assert full.count() == LIMIT
    assert chat(full.gateway, uid, f"{prompt_uid}-new").status == 429
    full.begin(f"{prompt_uid}-1")


def test_a_trainer_that_starts_bounds_the_groups_in_flight_also_after_a_kill(
    kafka: local_kafka.Broker, stub: StubEngine, tokenizer: Path
) -> None:
    """Needs gateways of its own: the others have a limit. The second finds everything in the log."""
    prefix = f"bound-{uuid.uuid4().hex[:8]}."
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=prefix)
    topics.create(connection, partitions=2)

    def begin(gateway: RunningGateway) -> Reply:
        return gateway.post("/init_trajectory", {"prompt_uid": uuid.uuid4().hex})

    with running_gateway(connection, [stub.url], tokenizer) as gateway:
        assert [begin(gateway).status for _ in range(3)] == [200] * 3
        started = PolicyVersion(
            run="default", incarnation=1, version=0, phase="started", groups_per_batch=1
        )
        write(connection, POLICY, [started])
        eventually(lambda: begin(gateway).status == 429)
        gateway.process.kill()
    # It is not ready, because its engine has weights of no incarnation; groups need none to begin.
    with running_gateway(connection, [stub.url], tokenizer, wait=False) as gateway:
        eventually(lambda: "Ready to serve calls" in gateway.log.read_text())
        reply = begin(gateway)
        assert reply.status == 429 and "(limit 3)" in error(reply)["message"]
