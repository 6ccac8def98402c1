"""kill -9, and everything that was acknowledged comes back from the log."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pool.connection import Connection
from pool.core.trajectories import step_of
from tests.gateway.client import (
    HELLO,
    RETRY,
    TOOLS,
    asked,
    call,
    chat,
    ends,
    error,
    eventually,
    feedback,
    ids_of,
    in_background,
    leave_early,
    log_of,
    notes,
    only_step,
    prompts,
    response,
    said,
    steps,
    text,
)
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.records import trajectory_of

pytestmark = pytest.mark.broker

NEXT = {"role": "user", "content": "go on"}
THOUGHT = "<think>\nlet me see\n</think>\n\nwell"


class Before:
    """What was told before the kill, by the name of the test that looks at it."""

    def __init__(self, gateway: RunningGateway, stub: StubEngine) -> None:
        self.gateway = gateway
        self.stub = stub

    def path(self, uid: str, route: str) -> str:
        return f"/{uid}/p-{uid}/v1/{route}"

    def chat(self, uid: str, messages: Any = HELLO, **body: Any) -> Any:
        reply = chat(self.gateway, uid, f"p-{uid}", messages, **body)
        assert reply.status == 200, reply
        return reply.body

    def post(self, uid: str, route: str, body: Any = None) -> None:
        assert self.gateway.post(self.path(uid, route), body).status == 200


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Answers before the kill."""
    return {}


@pytest.fixture(scope="module")
def gateway(
    log: Connection, stub: StubEngine, tokenizer: Path, told: dict[str, Any]
) -> Iterator[RunningGateway]:
    """The second life: all of `BEGIN` happened in the first."""
    with ExitStack() as stack:
        first = stack.enter_context(running_gateway(log, [stub.url], tokenizer))
        stub.reset()
        before = Before(first, stub)
        for name, begin in BEGIN.items():
            told[name] = begin(before)
        first.kill()
        yield stack.enter_context(running_gateway(log, [stub.url], tokenizer))


def _registered(before: Before) -> Any:
    body = {"channel": "val", "metadata": {"a": "é"}, "group_size": 3}
    before.post("registered", "register_trajectory", body)
    before.chat("registered")


def _talk(before: Before) -> Any:
    before.stub.script([said(THOUGHT)])
    return before.chat("talk")


def _closed(before: Before) -> Any:
    before.post("closed", "register_trajectory", {"channel": "val"})
    answer = before.chat("closed")
    before.post("closed", "complete_trajectory", {"reward": 0.5})
    return answer


def _answered(before: Before) -> Any:
    before.stub.script([said("I look." + call("look", '{"at":"home"}'))])
    return before.chat("answered", tools=TOOLS)


def _unheard(before: Before, uid: str = "unheard") -> Any:
    before.stub.script([said("slow", hold=0)])
    path = before.path(uid, "chat/completions")
    leave_early(before.gateway, before.stub, path, {"messages": HELLO})
    before.stub.release()
    eventually(lambda: notes(before.gateway, uid))


def _voted(before: Before) -> Any:
    _unheard(before, "voted")
    return before.chat("voted")["id"]


def _overflowed(before: Before) -> Any:
    before.chat("overflowed")
    before.stub.script([said("", fault="overflow")])
    reply = chat(before.gateway, "overflowed", "p-overflowed", [*HELLO, NEXT])
    assert error(reply)["code"] == "context_length_exceeded"


def _initialised(before: Before) -> Any:
    body = {"prompt_uid": "p-init", "channel": "val", "metadata": {"b": 2}}
    return before.gateway.post("/init_trajectory", body).body["trajectory_uid"]


BEGIN: dict[str, Callable[[Before], Any]] = {
    "numbered": lambda before: [before.chat("numbered") for _ in range(3)],
    "registered": _registered,
    "talk": _talk,
    "closed": _closed,
    "answered": _answered,
    "unheard": _unheard,
    "voted": _voted,
    "overflowed": _overflowed,
    "initialised": _initialised,
    "many": lambda before: [before.chat(f"many-{n}") for n in range(10)],
}


def test_numbering_goes_on(gateway: RunningGateway) -> None:
    chat(gateway, "numbered", "p-numbered")
    assert [step.step_index for step in steps(gateway, "numbered")] == [0, 1, 2, 3]


def test_channel_metadata_and_group_size_come_back(gateway: RunningGateway) -> None:
    """In the public original, validation data then leaked into the train channel."""
    chat(gateway, "registered", "p-registered")
    gateway.post("/registered/p-registered/v1/complete_trajectory", {"reward": 1})
    first, second = steps(gateway, "registered")
    (end,) = ends(gateway, "registered")
    for record in (first, second, end):
        assert (record.channel, record.group_size) == ("val", 3)
        assert json.loads(record.metadata) == {"a": "é"}
    assert (second.deadline, end.steps) == (first.deadline, 2)


def test_what_init_was_given_comes_back(gateway: RunningGateway, told: dict[str, Any]) -> None:
    chat(gateway, told["initialised"], "p-init")
    step = only_step(gateway, told["initialised"])
    assert (step.channel, json.loads(step.metadata), step.step_index) == ("val", {"b": 2}, 0)


def test_a_conversation_is_continued_exactly_and_as_a_delta(
    gateway: RunningGateway, stub: StubEngine, told: dict[str, Any]
) -> None:
    message = told["talk"]["choices"][0]["message"]
    chat(gateway, "talk", "p-talk", [*HELLO, message, NEXT])
    first, second = steps(gateway, "talk")
    whole = prompts(gateway, "talk")
    between = ids_of("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    assert asked(stub)[0] == whole[1] == whole[0] + response(first) + between
    assert second.parent == first.step_id


def test_a_closed_trajectory_stays_closed(gateway: RunningGateway) -> None:
    reply = chat(gateway, "closed", "p-closed")
    assert (reply.status, reply.headers["x-should-retry"]) == (409, "false")
    error(reply)
    assert gateway.post("/closed/p-closed/v1/register_trajectory").status == 409
    assert len(steps(gateway, "closed")) == 1


def test_the_same_complete_again_is_still_ok_and_another_is_not(gateway: RunningGateway) -> None:
    path = "/closed/p-closed/v1/complete_trajectory"
    assert gateway.post(path, {"reward": 0.5}).status == 200
    assert gateway.post(path, {"reward": 0.6}).status == 409
    assert gateway.post("/closed/other/v1/complete_trajectory", {"reward": 0.5}).status == 404
    assert len(ends(gateway, "closed")) == 1


def test_feedback_on_a_closed_trajectory_is_of_its_prompt_and_channel(
    gateway: RunningGateway, told: dict[str, Any]
) -> None:
    body = {"reward": 1, "step_id": told["closed"]["id"]}
    assert gateway.post("/closed/other/v1/feedback", body).status == 404
    assert gateway.post("/closed/p-closed/v1/feedback", body).status == 200
    (found,) = feedback(gateway, "closed")
    assert (found.prompt_uid, found.channel) == ("p-closed", "val")
    assert found.step_id == steps(gateway, "closed")[0].step_id


def test_a_marked_retry_gets_the_stored_answer(
    gateway: RunningGateway, stub: StubEngine, told: dict[str, Any]
) -> None:
    generated = len(stub.requests())
    again = chat(gateway, "answered", "p-answered", headers=RETRY, tools=TOOLS)
    assert again.status == 200
    assert (again.body["id"], again.body["usage"]) == (
        told["answered"]["id"],
        told["answered"]["usage"],
    )
    message, first = (body["choices"][0]["message"] for body in (again.body, told["answered"]))
    assert message["content"] == first["content"]
    assert message["tool_calls"][0]["function"] == first["tool_calls"][0]["function"]
    assert len(stub.requests()) == generated
    assert len(steps(gateway, "answered")) == 1


def test_an_answer_that_was_not_heard_is_told_and_its_note_taken_back(
    gateway: RunningGateway, stub: StubEngine
) -> None:
    assert text(chat(gateway, "unheard", "p-unheard", headers=RETRY)) == "slow"
    assert [n.delivered for n in eventually(lambda: notes(gateway, "unheard")[1:])] == [True]


def test_delivered_answers_stay_samples_and_an_undelivered_one_stays_replaced(
    gateway: RunningGateway, told: dict[str, Any]
) -> None:
    """An equal request follows, as if there had been no kill."""
    third = chat(gateway, "voted", "p-voted").body["id"]
    assert gateway.post("/voted/p-voted/v1/complete_trajectory").status == 200
    trajectory = trajectory_of(*log_of(gateway, "voted"))
    trained = [step_of(received).step_id for received in trajectory.steps[1:]]
    assert [f"chatcmpl-{step_id}" for step_id in trained] == [told["voted"], third]
    assert trajectory.orphans == {step_of(trajectory.steps[0]).step_id}


def test_a_trajectory_that_outgrew_the_context_is_still_truncated(gateway: RunningGateway) -> None:
    path = "/overflowed/p-overflowed/v1"
    assert gateway.post(f"{path}/complete_trajectory", {"status": "failed"}).status == 200
    assert gateway.post(f"{path}/feedback", {"reward": 0}).body == {"status": "ok"}
    trajectory = trajectory_of(*log_of(gateway, "overflowed")[:-1])
    assert trajectory.status == "truncated"


def test_many_come_back_at_once(gateway: RunningGateway) -> None:
    before = gateway.metric("gateway_recovered_trajectories_total")
    with in_background() as submit:
        sent = [submit(chat, gateway, f"many-{n}", f"p-many-{n}") for n in range(10)]
        assert {one.result().status for one in sent} == {200}
    assert gateway.metric("gateway_recovered_trajectories_total") == before + 10
    assert all(
        [step.step_index for step in steps(gateway, f"many-{n}")] == [0, 1] for n in range(10)
    )


def test_an_unknown_trajectory_is_still_unknown(gateway: RunningGateway, uid: str) -> None:
    assert gateway.post(f"/{uid}/p/v1/complete_trajectory").status == 404
    assert log_of(gateway, uid) == []
