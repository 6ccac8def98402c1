"""Trajectories: how they are opened, named, rated and closed, and what the log has of it."""

import json
import urllib.parse
from typing import Any

import msgspec
import pytest

from pool.core.progress import Received
from pool.core.trajectories import TrajectoryAssembler
from pool.topics import STEPS, TRAJECTORIES
from reward.worker.expiry import overdue
from schemas.packing import unpack_logprobs
from tests.gateway.client import (
    HELLO,
    asked,
    chat,
    ends,
    error,
    eventually,
    feedback,
    in_background,
    log_of,
    only_step,
    registrations,
    said,
    steps,
)
from tests.gateway.running import RunningGateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.log import write
from tests.pool.records import FAR

pytestmark = pytest.mark.broker


def init(gateway: RunningGateway, body: Any = None, **headers: str) -> dict[str, Any]:
    reply = gateway.post("/init_trajectory", body, headers)
    assert reply.status == 200, reply
    assert set(reply.body) == {"trajectory_uid", "base_url"}
    found: dict[str, Any] = reply.body
    return found


def path_of(begun: dict[str, Any]) -> str:
    return str(urllib.parse.urlsplit(begun["base_url"]).path)


# Opening


def test_init_needs_nothing(gateway: RunningGateway) -> None:
    begun = init(gateway)
    uid, prompt_uid = path_of(begun).split("/")[1:3]
    assert uid == begun["trajectory_uid"]
    assert begun["base_url"] == f"{gateway.url}/{uid}/{prompt_uid}/v1"
    assert gateway.post(begun["base_url"] + "/chat/completions", {"messages": HELLO}).status == 200
    assert only_step(gateway, uid).prompt_uid == prompt_uid


def test_what_init_was_given_is_in_every_step_and_in_the_end(
    gateway: RunningGateway, prompt_uid: str
) -> None:
    given = {
        "prompt_uid": prompt_uid,
        "channel": "val",
        "metadata": {"task": "é", "level": 3},
        "group_size": 4,
        "deadline_s": 100,
    }
    begun = init(gateway, given)
    uid = begun["trajectory_uid"]
    for _ in range(2):
        gateway.post(begun["base_url"] + "/chat/completions", {"messages": HELLO})
    gateway.post(begun["base_url"] + "/complete_trajectory", {"reward": 1.0})
    for record in log_of(gateway, uid):
        assert (record.prompt_uid, record.channel, record.group_size) == (prompt_uid, "val", 4)  # type: ignore[attr-defined]
        assert json.loads(record.metadata) == given["metadata"]  # type: ignore[attr-defined]
    first = steps(gateway, uid)[0]
    assert first.deadline is not None
    assert first.deadline == pytest.approx(first.created_at + 100_000, abs=5_000)


def test_two_inits_are_two_trajectories(gateway: RunningGateway) -> None:
    assert init(gateway)["trajectory_uid"] != init(gateway)["trajectory_uid"]


@pytest.mark.parametrize(
    ("headers", "base"),
    [
        ({"host": "agents.example:9000"}, "http://agents.example:9000"),
        ({"host": "a.example", "x-forwarded-proto": "https"}, "https://a.example"),
        (
            {"x-forwarded-proto": "https", "x-forwarded-host": "rl.example"},
            "https://rl.example",
        ),
        (
            {
                "x-forwarded-proto": "https",
                "x-forwarded-host": "rl.example",
                "x-forwarded-port": "8443",
                "x-forwarded-prefix": "/gateway/",
            },
            "https://rl.example:8443/gateway",
        ),
        (
            {
                "x-forwarded-proto": "https",
                "x-forwarded-host": "rl.example",
                "x-forwarded-port": "443",
            },
            "https://rl.example",
        ),
        (
            {"x-forwarded-host": "outer.example, inner.example", "x-forwarded-proto": "https,http"},
            "https://outer.example",
        ),
        ({"host": "[::1]:8100"}, "http://[::1]:8100"),
        ({"host": "[::1]", "x-forwarded-port": "81"}, "http://[::1]:81"),
    ],
)
def test_base_url_is_the_address_that_the_client_used(
    gateway: RunningGateway, headers: dict[str, str], base: str
) -> None:
    begun = init(gateway, {"prompt_uid": "p"}, **headers)
    assert begun["base_url"] == f"{base}/{begun['trajectory_uid']}/p/v1"


@pytest.mark.parametrize("odd", ["two words", "50%41", "a?b=c", "a#b", "größe", "...", "a&b+c"])
def test_a_prompt_uid_of_any_characters_survives_the_url(gateway: RunningGateway, odd: str) -> None:
    import openai

    begun = init(gateway, {"prompt_uid": odd})
    with openai.OpenAI(base_url=begun["base_url"], api_key="none", max_retries=0) as client:
        client.chat.completions.create(model="", messages=HELLO)
    assert only_step(gateway, begun["trajectory_uid"]).prompt_uid == odd


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": [1]},
        {"metadata": "x"},
        {"metadata": 5},
        {"group_size": 0},
        {"group_size": "8"},
        {"deadline_s": -1},
        {"channel": ""},
        {"channel": 5},
        {"prompt_uid": ""},
        {"prompt_uid": "a/b"},
        {"prompt_uid": ".."},
        {"prompt_uid": "line\nbreak"},
        {"prompt_uid": "p" * 201},
        [],
    ],
)
def test_an_init_that_cannot_be_used_is_400(gateway: RunningGateway, body: Any) -> None:
    reply = gateway.post("/init_trajectory", body)
    assert reply.status == 400
    error(reply)


def test_a_first_call_on_any_pair_registers_it(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    assert chat(gateway, uid, prompt_uid).status == 200
    (found,) = registrations(gateway, uid)
    assert (found.prompt_uid, found.channel, found.status) == (prompt_uid, "train", None)


def test_a_client_may_put_its_own_prompt_into_the_url_before_the_first_call(
    gateway: RunningGateway, prompt_uid: str
) -> None:
    begun = init(gateway, {"prompt_uid": "given", "channel": "val", "metadata": {"a": 1}})
    uid = begun["trajectory_uid"]
    assert chat(gateway, uid, prompt_uid).status == 200
    step = only_step(gateway, uid)
    assert (step.prompt_uid, step.channel, step.metadata) == (prompt_uid, "val", '{"a":1}')


def test_another_prompt_after_the_first_call_is_400(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    assert chat(gateway, uid, "another").status == 400
    assert len(steps(gateway, uid)) == 1


def test_a_uid_that_is_too_long_or_cannot_be_printed_is_400(
    gateway: RunningGateway, prompt_uid: str
) -> None:
    assert chat(gateway, "t" * 201, prompt_uid).status == 400
    assert chat(gateway, "t%07", prompt_uid).status == 400


# Registering


def test_register_holds_for_later_steps_only_and_can_be_repeated(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    base = f"/{uid}/{prompt_uid}/v1"
    chat(gateway, uid, prompt_uid)
    for channel, metadata in (("val", {"n": 1}), ("other", {"n": 2})):
        reply = gateway.post(
            base + "/register_trajectory", {"channel": channel, "metadata": metadata}
        )
        assert (reply.status, reply.body) == (200, {"status": "ok"})
        chat(gateway, uid, prompt_uid)
    found = [(step.channel, json.loads(step.metadata)) for step in steps(gateway, uid)]
    assert found == [("train", {}), ("val", {"n": 1}), ("other", {"n": 2})]


def test_register_without_a_channel_keeps_it(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    base = f"/{uid}/{prompt_uid}/v1"
    gateway.post(base + "/register_trajectory", {"channel": "val"})
    gateway.post(base + "/register_trajectory", {"metadata": {"a": [1]}})
    chat(gateway, uid, prompt_uid)
    step = only_step(gateway, uid)
    assert (step.channel, json.loads(step.metadata)) == ("val", {"a": [1]})


def test_register_before_any_call_opens_the_trajectory(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    assert gateway.post(f"/{uid}/{prompt_uid}/v1/register_trajectory").status == 200
    assert gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory").status == 200
    assert ends(gateway, uid)[0].steps == 0


@pytest.mark.parametrize("metadata", ["x", 5, [1], True])
def test_metadata_that_is_no_object_is_400(
    gateway: RunningGateway, uid: str, prompt_uid: str, metadata: Any
) -> None:
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/register_trajectory", {"metadata": metadata})
    assert reply.status == 400
    assert error(reply)["param"] == "metadata"
    assert registrations(gateway, uid) == []


# Closing


def test_complete_is_an_end_with_the_number_of_steps(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    chat(gateway, uid, prompt_uid)
    body = {"reward": 0.5, "status": "truncated", "reason": "long", "reward_expected": True}
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory", body)
    assert (reply.status, reply.body) == (200, {"status": "ok"})
    (end,) = ends(gateway, uid)
    assert (end.steps, end.reward, end.status) == (2, 0.5, "truncated")
    assert (end.reason, end.reward_expected) == ("long", True)
    assert registrations(gateway, uid)[-1].status == "truncated"


def test_complete_takes_advantages_by_the_ids_of_answers(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    first, second = (chat(gateway, uid, prompt_uid).body["id"] for _ in range(2))
    path = f"/{uid}/{prompt_uid}/v1/complete_trajectory"
    tokens = len(steps(gateway, uid)[0].response_ids) // 4
    wrongs: list[dict[str, Any]] = [
        {first: [1.0] * (tokens + 1)},
        {first: []},
        {"chatcmpl-no": 1.0},
    ]
    for wrong in wrongs:
        reply = gateway.post(path, {"reward": 1, "advantages": wrong})
        assert reply.status == 422 and error(reply)["param"] == "advantages"
    values = [float(n) for n in range(tokens)]
    body = {"reward": 1, "advantages": {first: values, second: -0.5}}
    assert [gateway.post(path, body).status for _ in range(2)] == [200, 200]
    (end,) = ends(gateway, uid)
    given = [(one.step_id, unpack_logprobs(one.values).tolist()) for one in end.advantages]
    assert given == [
        (first.removeprefix("chatcmpl-"), values),
        (second.removeprefix("chatcmpl-"), [-0.5]),
    ]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (None, {}),
        (b"", {"content-type": ""}),
        (b"{}", {"content-type": "text/plain"}),
        (b" null ", {}),
        (b'{"unknown": 1, "steps": 7}', {}),
    ],
)
def test_complete_needs_no_body(
    gateway: RunningGateway, uid: str, prompt_uid: str, body: Any, headers: dict[str, str]
) -> None:
    chat(gateway, uid, prompt_uid)
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory", body, headers)
    assert reply.status == 200
    (end,) = ends(gateway, uid)
    assert (end.status, end.reward, end.steps) == ("completed", None, 1)


def test_the_same_complete_again_is_ok_and_written_once(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    path = f"/{uid}/{prompt_uid}/v1/complete_trajectory"
    assert [gateway.post(path, {"reward": 1}).status for _ in range(3)] == [200] * 3
    assert len(ends(gateway, uid)) == 1


@pytest.mark.parametrize(
    "other", [{"reward": 2}, {}, {"reward": 1, "status": "failed"}, {"reward": 1, "channel": "x"}]
)
def test_another_complete_is_409(
    gateway: RunningGateway, uid: str, prompt_uid: str, other: Any
) -> None:
    chat(gateway, uid, prompt_uid)
    path = f"/{uid}/{prompt_uid}/v1/complete_trajectory"
    gateway.post(path, {"reward": 1})
    reply = gateway.post(path, other)
    assert reply.status == 409
    error(reply)
    assert len(ends(gateway, uid)) == 1


def test_of_different_completes_at_once_one_holds(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    path = f"/{uid}/{prompt_uid}/v1/complete_trajectory"
    with in_background() as submit:
        sent = [submit(gateway.post, path, {"reward": reward}) for reward in range(8)]
        statuses = [one.result().status for one in sent]
    assert sorted(statuses) == [200] + [409] * 7
    (end,) = ends(gateway, uid)
    assert statuses[int(end.reward or 0)] == 200


@pytest.mark.parametrize("route", ["complete_trajectory", "feedback"])
def test_an_unknown_trajectory_is_404(
    gateway: RunningGateway, uid: str, prompt_uid: str, route: str
) -> None:
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/{route}", {"reward": 1})
    assert reply.status == 404
    assert error(reply)["type"] == "not_found_error"
    assert log_of(gateway, uid) == []


def test_complete_of_another_prompt_is_404(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    assert gateway.post(f"/{uid}/another/v1/complete_trajectory").status == 404
    assert ends(gateway, uid) == []


@pytest.mark.parametrize("route", ["chat/completions", "register_trajectory"])
def test_what_comes_after_the_end_is_409_and_not_recorded(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, route: str
) -> None:
    chat(gateway, uid, prompt_uid)
    gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory")
    generated, written = len(stub.requests()), len(log_of(gateway, uid))
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/{route}", {"messages": HELLO})
    assert reply.status == 409
    error(reply)
    assert (len(stub.requests()), len(log_of(gateway, uid))) == (generated, written)


def test_complete_waits_for_running_calls(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    def running() -> float:
        return gateway.metric("gateway_inflight_requests") - 1  # without the question itself

    stub.script([said("slow", hold=0)])
    eventually(lambda: running() == 0)  # what other tests left
    with in_background() as submit:
        slow = submit(chat, gateway, uid, prompt_uid)
        eventually(lambda: stub.waiting() == 0)
        closed = submit(gateway.post, f"/{uid}/{prompt_uid}/v1/complete_trajectory")
        eventually(lambda: running() == 2)
        stub.release()
        assert (closed.result().status, slow.result().status) == (200, 200)
    kinds = [type(record).__name__ for record in log_of(gateway, uid)]
    assert kinds == ["Step", "TrajectoryEnd"]
    assert ends(gateway, uid)[0].steps == 1


def test_complete_does_not_undo_the_registered_channel(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    gateway.post(f"/{uid}/{prompt_uid}/v1/register_trajectory", {"channel": "val"})
    chat(gateway, uid, prompt_uid)
    gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory", {"reward": 1})
    assert ends(gateway, uid)[0].channel == "val"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"reward": NaN}', 400),
        (b'{"reward": Infinity}', 400),
        (b'{"reward": 1e999}', (400, 422)),
        (b'{"reward": "good"}', 400),
        (b'{"reward": true}', 400),
        (b'{"status": "expired"}', 400),
        (b'{"status": "great"}', 400),
        (b"[]", 400),
        (b"{", 400),
    ],
)
def test_an_end_that_cannot_be_used_is_refused_and_the_trajectory_stays_open(
    gateway: RunningGateway, uid: str, prompt_uid: str, body: bytes, status: Any
) -> None:
    chat(gateway, uid, prompt_uid)
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory", body)
    assert reply.status in (status if isinstance(status, tuple) else (status,))
    error(reply)
    assert chat(gateway, uid, prompt_uid).status == 200
    assert ends(gateway, uid) == []


# Feedback


def test_feedback_rates_the_trajectory_or_one_step_by_its_answers_id(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    path = f"/{uid}/{prompt_uid}/v1/feedback"
    answer = chat(gateway, uid, prompt_uid).body["id"]
    step = only_step(gateway, uid).step_id
    assert gateway.post(path, {"reward": 1, "metadata": {"by": "me"}}).body == {"status": "ok"}
    assert gateway.post(path, {"reward": 0.5, "step_id": answer}).status == 200
    assert gateway.post(path, {"reward": -2, "step_id": step}).status == 200
    found = feedback(gateway, uid)
    assert [(one.reward, one.step_id) for one in found] == [(1, None), (0.5, step), (-2, step)]
    assert json.loads(found[0].metadata) == {"by": "me"}
    assert {(one.prompt_uid, one.channel) for one in found} == {(prompt_uid, "train")}


def test_feedback_is_taken_after_the_end(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    answer = chat(gateway, uid, prompt_uid).body["id"]
    gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory", {"reward_expected": True})
    path = f"/{uid}/{prompt_uid}/v1/feedback"
    assert gateway.post(path, {"reward": 1, "step_id": answer}).status == 200
    assert len(feedback(gateway, uid)) == 1


def expire(gateway: RunningGateway, uid: str, *topics: str) -> None:
    """Writes what a reward worker writes when the deadline has passed."""
    assembler = TrajectoryAssembler()
    assembler.feed(Received(only_step(gateway, uid), 0, 0))
    [(end, closing, _)] = overdue(assembler, FAR)
    begins = registrations(gateway, uid)[-1].begins
    written = {STEPS: end, TRAJECTORIES: msgspec.structs.replace(closing, begins=begins)}
    for topic in topics:
        write(gateway.connection, topic, [written[topic]])


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_feedback_on_what_cannot_be_trained_is_kept_and_says_so(
    gateway: RunningGateway, uid: str, prompt_uid: str, status: str
) -> None:
    chat(gateway, uid, prompt_uid)
    base = f"/{uid}/{prompt_uid}/v1"
    if status == "expired":
        expire(gateway, uid, STEPS, TRAJECTORIES)
    else:
        gateway.post(f"{base}/complete_trajectory", {"status": status})
    replies: list[dict[str, str]] = []

    def is_warned() -> bool:  # the gateway hears of an expired one within moments
        reply = gateway.post(f"{base}/feedback", {"reward": 1})
        assert (reply.status, reply.body["status"]) == (200, "ok")
        replies.append(reply.body)
        return "warning" in reply.body

    eventually(is_warned)
    assert f"has ended with status {status}, so it is not trained" in replies[-1]["warning"]
    assert len(feedback(gateway, uid)) == len(replies)


def test_a_completion_after_the_expired_end_does_not_hold(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    """Whether or not the gateway has heard of it: the first End in the log holds."""
    base = f"/{uid}/{prompt_uid}/v1"
    gateway.post(f"{base}/register_trajectory", {"deadline_s": 30})
    chat(gateway, uid, prompt_uid)
    expire(gateway, uid, STEPS)
    for _ in range(2):
        reply = gateway.post(f"{base}/complete_trajectory", {"reward": 1})
        assert reply.status == 409
        assert "has expired: its deadline passed" in error(reply)["message"]
    assert [end.status for end in ends(gateway, uid)] == ["expired", "completed"]
    assert "warning" in gateway.post(f"{base}/feedback", {"reward": 1}).body
    assert gateway.post(f"{base}/chat/completions", {"messages": HELLO}).status == 409


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"reward": 1, "step_id": "nobody"}', 404),
        (b'{"reward": NaN}', 400),
        (b'{"reward": null}', 400),
        (b"{}", 400),
        (b'{"reward": 1, "metadata": []}', 400),
    ],
)
def test_feedback_that_cannot_be_used_is_refused(
    gateway: RunningGateway, uid: str, prompt_uid: str, body: bytes, status: int
) -> None:
    chat(gateway, uid, prompt_uid)
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/feedback", body)
    assert reply.status == status
    error(reply)
    assert feedback(gateway, uid) == []


# Numbering


def test_an_index_is_reserved_when_the_request_arrives(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("slow", hold=0), said("fast")])
    with in_background() as submit:
        slow = submit(chat, gateway, uid, prompt_uid)
        eventually(lambda: stub.waiting() == 1)
        fast = chat(gateway, uid, prompt_uid, [{"role": "user", "content": "quick"}])
        stub.release()
        names = {slow.result().body["id"]: "slow", fast.body["id"]: "fast"}
    found = {names[f"chatcmpl-{s.step_id}"]: s.step_index for s in steps(gateway, uid)}
    assert found == {"slow": 0, "fast": 1}


def test_a_call_that_failed_leaves_a_gap(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    stub.script([said("x", fault="status:400")])
    reply = chat(gateway, uid, prompt_uid)
    assert reply.status == 400
    error(reply)
    chat(gateway, uid, prompt_uid)
    assert [step.step_index for step in steps(gateway, uid)] == [0, 2]
    gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory")
    assert ends(gateway, uid)[0].steps == 2


def test_many_calls_at_once_have_each_an_index_and_a_step(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    with in_background() as submit:
        sent = [
            submit(chat, gateway, uid, prompt_uid, [{"role": "user", "content": str(n)}])
            for n in range(12)
        ]
        assert {one.result().status for one in sent} == {200}
    found = steps(gateway, uid)
    assert sorted(step.step_index for step in found) == list(range(12))
    assert len({step.step_id for step in found}) == 12
    assert len({tuple(prompt) for prompt in asked(stub, 12)}) == 12
