"""Calls that do not fit into the model's context: the trajectory is truncated, unless it goes on."""

import pytest

from pool.core.trajectories import Trajectory
from tests.gateway.client import HELLO, chat, error, log_of, notes, said
from tests.gateway.running import RunningGateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.records import trajectory_of

pytestmark = pytest.mark.broker

LONGER = [*HELLO, {"role": "user", "content": "go on"}]
TOO_LONG = said("", fault="overflow")


def overflow(gateway: RunningGateway, stub: StubEngine, uid: str, stream: bool = False) -> None:
    stub.script([TOO_LONG])
    reply = chat(gateway, uid, f"p-{uid}", LONGER, stream=stream)
    assert reply.status == 400 and error(reply)["code"] == "context_length_exceeded"


def completed(gateway: RunningGateway, uid: str, status: str) -> Trajectory:
    path = f"/{uid}/p-{uid}/v1/complete_trajectory"
    for _ in range(2):
        assert gateway.post(path, {"status": status}).status == 200, "repeating it is fine"
    return trajectory_of(*log_of(gateway, uid))


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_fails_on_it_is_truncated(
    gateway: RunningGateway, stub: StubEngine, uid: str, stream: bool
) -> None:
    chat(gateway, uid, f"p-{uid}")
    before = gateway.metric("gateway_context_overflows_total")
    for _ in range(2):
        overflow(gateway, stub, uid, stream)
    assert len(notes(gateway, uid)) == 1, "that it asks again says nothing new"
    assert gateway.metric("gateway_context_overflows_total") == before + 1
    trajectory = completed(gateway, uid, "failed")
    assert (trajectory.end.status, trajectory.status) == ("failed", "truncated")
    assert len(trajectory.steps) == trajectory.end.steps == 1
    reply = gateway.post(f"/{uid}/p-{uid}/v1/feedback", {"reward": 0})
    assert reply.body == {"status": "ok"}, "the reward counts"


def test_an_agent_that_shortens_its_history_goes_on(
    gateway: RunningGateway, stub: StubEngine, uid: str
) -> None:
    chat(gateway, uid, f"p-{uid}")
    overflow(gateway, stub, uid)
    chat(gateway, uid, f"p-{uid}")
    assert completed(gateway, uid, "completed").status == "completed"


def test_a_task_that_never_fit_is_not_noted(
    gateway: RunningGateway, stub: StubEngine, uid: str
) -> None:
    overflow(gateway, stub, uid)
    assert log_of(gateway, uid) == []
    assert completed(gateway, uid, "failed").status == "failed"
