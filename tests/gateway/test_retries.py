"""A client that asks again, or goes away: one call is one Step, and the log says what was heard."""

import json
import time
from typing import Any

import pytest

from pool.core.trajectories import step_of
from tests.gateway.client import (
    HELLO,
    RETRY,
    TOOLS,
    Streaming,
    call,
    chat,
    eventually,
    in_background,
    leave_early,
    log_of,
    notes,
    only_step,
    response,
    said,
    steps,
    text,
)
from tests.gateway.running import Reply, RunningGateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.records import trajectory_of

pytestmark = pytest.mark.broker

OTHER: Any = [{"role": "user", "content": "something else"}]


def path(uid: str, prompt_uid: str) -> str:
    return f"/{uid}/{prompt_uid}/v1/chat/completions"


def told(reply: Reply) -> list[Any]:
    """The chunks of a streamed reply."""
    lines = str(reply.body).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_a_marked_retry_joins_the_running_call(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    before = len(stub.requests())
    stub.script([said("slow", hold=0)])
    joined = gateway.metric("gateway_retries_served_total", how="joined")
    with in_background() as submit:
        first = submit(chat, gateway, uid, prompt_uid)
        eventually(lambda: stub.waiting() == 0)
        again = submit(chat, gateway, uid, prompt_uid, headers=RETRY)
        eventually(lambda: gateway.metric("gateway_retries_served_total", how="joined") > joined)
        stub.release()
        assert again.result().body == first.result().body
    assert len(stub.requests()) == before + 1
    assert f"chatcmpl-{only_step(gateway, uid).step_id}" == first.result().body["id"]


def test_a_marked_retry_of_a_stream_gets_all_of_it(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    before = len(stub.requests())
    stub.script([said("abcdef", chunk_delay=0.1)])
    stream = Streaming(gateway, path(uid, prompt_uid), {"messages": HELLO, "stream": True})
    events = stream.events()
    while "b" not in json.loads(next(events))["choices"][0]["delta"].get("content", ""):
        pass
    again = chat(gateway, uid, prompt_uid, headers=RETRY, stream=True)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in told(again)) == "abcdef"
    assert list(events)[-1] == "[DONE]"
    assert len(stub.requests()) == before + 1
    assert len(steps(gateway, uid)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_call_is_rebuilt_from_its_step(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool
) -> None:
    before = len(stub.requests())
    stub.script([said("well done")])
    asking: Any = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    first = chat(gateway, uid, prompt_uid, **asking)
    again = chat(gateway, uid, prompt_uid, headers=RETRY, **asking)
    if stream:
        assert told(again)[0]["id"] == told(first)[0]["id"]
        parts = [c["choices"][0] for c in told(again) if c["choices"]]
        assert "".join(part["delta"].get("content", "") for part in parts) == "well done"
        assert parts[-1]["finish_reason"] == "stop"
        assert told(again)[-1]["usage"] == told(first)[-1]["usage"]
    else:
        assert again.body == first.body
    assert len(stub.requests()) == before + 1
    assert len(steps(gateway, uid)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_rebuilt_too(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool
) -> None:
    stub.script([said("I look." + call("look", '{"at":"home"}'))])
    first = chat(gateway, uid, prompt_uid, tools=TOOLS, stream=stream)
    again = chat(gateway, uid, prompt_uid, headers=RETRY, tools=TOOLS, stream=stream)
    if stream:
        assert told(again)[0]["id"] == told(first)[0]["id"]
        deltas = [chunk["choices"][0]["delta"] for chunk in told(again)]
        calls = [called for delta in deltas for called in delta.get("tool_calls", [])]
        assert told(again)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    else:
        assert again.body["id"] == first.body["id"]
        calls = again.body["choices"][0]["message"]["tool_calls"]
        assert again.body["choices"][0]["message"]["content"] == "I look."
    assert [c["function"]["name"] for c in calls] == ["look"]
    assert json.loads("".join(c["function"]["arguments"] for c in calls)) == {"at": "home"}


def test_a_rebuilt_answer_has_the_ids_and_logprobs_that_were_asked_for(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    first = chat(gateway, uid, prompt_uid, logprobs=True, return_token_ids=True)
    again = chat(gateway, uid, prompt_uid, headers=RETRY, logprobs=True, return_token_ids=True)
    assert again.body["choices"][0]["token_ids"] == first.body["choices"][0]["token_ids"]
    assert again.body["prompt_token_ids"] == first.body["prompt_token_ids"]
    values = [
        [token["logprob"] for token in reply.body["choices"][0]["logprobs"]["content"]]
        for reply in (first, again)
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "0"}])
def test_an_equal_request_without_a_mark_is_a_new_step(
    gateway: RunningGateway, uid: str, prompt_uid: str, headers: dict[str, str]
) -> None:
    first, second = (chat(gateway, uid, prompt_uid, headers=headers) for _ in range(2))
    assert first.body["id"] != second.body["id"]
    assert [step.step_index for step in steps(gateway, uid)] == [0, 1]


def kept(gateway: RunningGateway, uid: str, prompt_uid: str) -> list[str]:
    """Completes the trajectory; the texts that may be trained, as every reader of the log has them."""
    assert gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory", {"reward": 1}).status == 200
    trajectory = trajectory_of(*log_of(gateway, uid))
    assert trajectory.problem is None
    steps_ = [step_of(received) for received in trajectory.steps]
    trained = [step for step in steps_ if step.step_id not in trajectory.orphans]
    return [bytes(id_ for id_ in response(step) if id_ < 256).decode() for step in trained]


def test_an_agent_that_votes_keeps_all_its_steps(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("heads"), said("tails"), said("heads")])
    for stream in (False, True, False):
        assert chat(gateway, uid, prompt_uid, stream=stream).status == 200
    assert kept(gateway, uid, prompt_uid) == ["heads", "tails", "heads"]


METADATA = {"session": "s", "turn": "t", "window": "w"}
APIS: dict[str, Any] = {
    "chat/completions": {"messages": HELLO, "temperature": 1, "metadata": METADATA},
    "messages": {"messages": HELLO, "max_tokens": 9, "temperature": 1, "metadata": METADATA},
    "responses": {"input": "hello", "temperature": 1, "client_metadata": METADATA},
}


def in_another_order(body: Any) -> Any:
    """The same JSON with its keys the other way round, as Codex sends its metadata."""
    if not isinstance(body, dict):
        return body
    return {name: in_another_order(value) for name, value in reversed(body.items())}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", APIS)
def test_an_answer_that_was_not_delivered_is_replaced_by_an_equal_request(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, route: str, stream: bool
) -> None:
    body, url = APIS[route] | {"stream": stream}, f"/{uid}/{prompt_uid}/v1/{route}"
    stub.script([said("lost", hold=0), said("found")])
    leave_early(gateway, stub, url, body)
    stub.release()
    eventually(lambda: notes(gateway, uid))
    assert gateway.post(url, in_another_order(body)).status == 200
    lost, found = steps(gateway, uid)
    assert lost.request_hash == found.request_hash
    assert kept(gateway, uid, prompt_uid) == ["found"]


def test_an_answer_that_was_not_delivered_is_not_trained_if_nothing_follows(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("heard"), said("lost", hold=0)])
    chat(gateway, uid, prompt_uid)
    leave_early(gateway, stub, path(uid, prompt_uid), {"messages": OTHER})
    stub.release()
    eventually(lambda: notes(gateway, uid))
    assert kept(gateway, uid, prompt_uid) == ["heard"]


@pytest.mark.parametrize("route", APIS)
def test_a_marked_retry_is_recognised_whatever_the_order_of_its_keys(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, route: str
) -> None:
    before, url = len(stub.requests()), f"/{uid}/{prompt_uid}/v1/{route}"
    first = gateway.post(url, APIS[route])
    again = gateway.post(url, in_another_order(APIS[route]), RETRY)
    assert (first.status, again.body["id"]) == (200, first.body["id"])
    assert len(stub.requests()) == before + 1


def test_a_marked_retry_of_something_else_is_a_new_step(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    chat(gateway, uid, prompt_uid, OTHER, headers=RETRY)
    assert len(steps(gateway, uid)) == 2


def test_a_retry_repeats_the_newest_of_equal_requests(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    """The agent samples twice on purpose; the second call is the one that its client retries."""
    before = len(stub.requests())
    stub.script([said("one"), said("two", hold=0)])
    assert text(chat(gateway, uid, prompt_uid)) == "one"
    leave_early(gateway, stub, path(uid, prompt_uid), {"messages": HELLO})
    stub.release()
    assert text(chat(gateway, uid, prompt_uid, headers=RETRY)) == "two"
    assert len(stub.requests()) == before + 2


def test_a_retry_of_a_failed_call_is_generated_under_its_index(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("x", fault="status:400"), said("other"), said("well")])
    assert chat(gateway, uid, prompt_uid).status == 400
    chat(gateway, uid, prompt_uid, OTHER)
    assert text(chat(gateway, uid, prompt_uid, headers=RETRY)) == "well"
    assert [step.step_index for step in steps(gateway, uid)] == [1, 0]


def test_a_retry_of_a_failed_repetition_is_not_answered_with_the_first(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("one"), said("x", fault="status:400"), said("two")])
    chat(gateway, uid, prompt_uid)
    assert chat(gateway, uid, prompt_uid).status == 400
    assert text(chat(gateway, uid, prompt_uid, headers=RETRY)) == "two"
    assert [step.step_index for step in steps(gateway, uid)] == [0, 1]


def test_the_real_client_times_out_and_retries_and_there_is_one_step(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    before = len(stub.requests())
    stub.script([said("slow but sure", delay=1.2)])
    client = gateway.openai(uid, prompt_uid, max_retries=20, timeout=0.5)
    answer = client.chat.completions.create(model="", messages=HELLO)
    assert answer.choices[0].message.content == "slow but sure"
    assert len(stub.requests()) == before + 1
    assert answer.id == f"chatcmpl-{only_step(gateway, uid).step_id}"


def test_a_client_that_gave_up_leaves_one_step(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    import openai

    """The public original stored three."""
    stub.script([said("slow", hold=0)])
    client = gateway.openai(uid, prompt_uid, max_retries=1, timeout=1.0)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="", messages=HELLO)
    stub.release()
    eventually(lambda: notes(gateway, uid))
    assert len(steps(gateway, uid)) == 1


# Going away


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_waits_for_is_noted_and_a_retry_takes_the_note_back(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool
) -> None:
    cancelled, generated = stub.cancelled(), len(stub.requests())
    stub.script([said("slow", hold=0)])
    leave_early(gateway, stub, path(uid, prompt_uid), {"messages": HELLO, "stream": stream})
    stub.release()
    (noted,) = eventually(lambda: notes(gateway, uid))
    step = only_step(gateway, uid)
    assert (noted.step_id, noted.delivered) == (step.step_id, False)
    assert (noted.prompt_uid, noted.trajectory_uid) == (prompt_uid, uid)
    again = chat(gateway, uid, prompt_uid, headers=RETRY, stream=stream)
    assert step.step_id in json.dumps(again.body)
    assert [note.delivered for note in eventually(lambda: notes(gateway, uid)[1:])] == [True]
    assert stub.cancelled() == cancelled
    assert len(stub.requests()) == generated + 1


def test_a_stream_that_was_left_in_the_middle_goes_on_to_its_step(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("abcdef", hold=1)])
    stream = Streaming(gateway, path(uid, prompt_uid), {"messages": HELLO, "stream": True})
    events = stream.events()
    next(events)
    events.close()  # type: ignore[attr-defined]
    stream.leave()
    stub.release()
    (noted,) = eventually(lambda: notes(gateway, uid))
    assert noted.step_id == only_step(gateway, uid).step_id
    assert not noted.delivered


def test_an_answer_that_was_heard_has_no_note(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    chat(gateway, uid, prompt_uid, stream=True)
    chat(gateway, uid, prompt_uid, headers=RETRY)
    assert notes(gateway, uid) == []


def test_a_retry_that_joins_an_abandoned_call_hears_it_and_there_is_no_note(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("slow", hold=0)])
    leave_early(gateway, stub, path(uid, prompt_uid), {"messages": HELLO})
    joined = gateway.metric("gateway_retries_served_total", how="joined")
    with in_background() as submit:
        again = submit(chat, gateway, uid, prompt_uid, headers=RETRY)
        eventually(lambda: gateway.metric("gateway_retries_served_total", how="joined") > joined)
        stub.release()
        assert text(again.result()) == "slow"
    assert notes(gateway, uid) == []


@pytest.mark.slow
def test_after_the_grace_a_call_is_cancelled_and_a_retry_generates_it_anew(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    cancelled, generated = stub.cancelled(), len(stub.requests())
    stub.script([said("never", delay=60), said("other"), said("anew")])
    began = time.monotonic()
    leave_early(gateway, stub, path(uid, prompt_uid), {"messages": HELLO})
    chat(gateway, uid, prompt_uid, OTHER)
    eventually(lambda: stub.cancelled() == cancelled + 1, limit=60)
    assert time.monotonic() - began > 8
    assert text(chat(gateway, uid, prompt_uid, headers=RETRY)) == "anew"
    assert len(stub.requests()) == generated + 3
    assert [step.step_index for step in steps(gateway, uid)] == [1, 0]
    assert notes(gateway, uid) == []
