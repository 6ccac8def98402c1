"""Agents that handle ids themselves: generate, submit Steps, compute a reward."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pool.connection import Connection
from pool.core.prompts import full_prompts
from schemas.packing import unpack_ids, unpack_logprobs
from tests.gateway.client import (
    chat,
    ends,
    error,
    log_of,
    only_step,
    response,
    said,
    steps,
)
from tests.gateway.running import Reply, RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.tiny_model import EOS

pytestmark = pytest.mark.broker

LONG = list(range(1, 31))


# generate


def test_generate_gives_ids_and_logprobs_and_records_nothing(
    gateway: RunningGateway, stub: StubEngine
) -> None:
    before = gateway.metric("steps_published_total")
    stub.script([{"ids": [65, EOS], "logprobs": [-0.5, -0.25]}])
    sampling = {"temperature": 0.5, "max_tokens": 3, "anything": {"of": "vLLM's"}}
    reply = gateway.post("/generate", {"prompt_ids": [1, 2, 3], "sampling_params": sampling})
    assert reply.status == 200
    assert reply.body["token_ids"] == [65, EOS]
    assert reply.body["log_probs"] == [-0.5, -0.25]
    assert reply.body["stop_reason"] == "stop"
    sent = stub.requests()[-1]
    assert (sent["token_ids"], sent["sampling_params"]) == ([1, 2, 3], sampling | {"logprobs": 0})
    assert gateway.metric("steps_published_total") == before


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt_ids": []},
        {"prompt_ids": "text"},
        {"prompt_ids": [-1]},
        {"prompt_ids": [2**31]},
        {"prompt_ids": [1.5]},
        {"prompt_ids": [1], "sampling_params": [1]},
        {"prompt_ids": [1], "sampling_params": {"n": 2}},
        {"prompt_ids": [1], "sampling_params": {"temperature": -1}},
        {"prompt_ids": [1], "image_data": ["x"]},
    ],
)
def test_generate_refuses_what_it_cannot_do(gateway: RunningGateway, body: Any) -> None:
    reply = gateway.post("/generate", body)
    assert reply.status == 400
    error(reply)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": "hot"}, {"stop": 5}, {"stop": "a"}, {"skip_special_tokens": "x"}, {"n": "x"}],
)
def test_odd_settings_are_the_engines_to_judge_and_never_break_the_gateway(
    gateway: RunningGateway, sampling: Any
) -> None:
    reply = gateway.post("/generate", {"prompt_ids": [1], "sampling_params": sampling})
    assert reply.status in (200, 400), reply


def test_the_engines_refusal_is_the_clients(gateway: RunningGateway, stub: StubEngine) -> None:
    stub.script([said("x", fault="status:400")])
    reply = gateway.post("/generate", {"prompt_ids": [1]})
    assert reply.status == 400
    assert "the script says so" in error(reply)["message"]


# submit_steps


def submitted(uid: str, prompt_uid: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    step: dict[str, Any] = {
        "prompt_ids": [*LONG, index],
        "response_ids": [7, 8],
        "rollout_log_probs": [-0.5, -0.25],
        "trajectory_uid": uid,
        "prompt_uid": prompt_uid,
        "step_index": index,
        "policy_version": 0,
        "is_last": False,
    }
    return step | fields


def submit(gateway: RunningGateway, *found: Any, channel: str = "train") -> Reply:
    return gateway.post(f"/submit_steps?channel={channel}", {"steps": list(found)})


def test_submitted_steps_are_in_the_log_as_they_came(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    reply = submit(
        gateway,
        submitted(uid, prompt_uid, 0, reward=0.5, metadata={"a": 1}, routed_experts=[[1]], other=1),
        submitted(uid, prompt_uid, 1, is_last=True),
        channel="val",
    )
    assert (reply.status, reply.body) == (200, {"accepted": 2})
    first, second = steps(gateway, uid)
    assert (first.step_index, second.step_index) == (0, 1)
    assert (first.reward, json.loads(first.metadata), first.channel) == (0.5, {"a": 1}, "val")
    assert response(first) == [7, 8]
    assert list(unpack_logprobs(first.response_logprobs)) == [-0.5, -0.25]
    assert first.not_trainable is None
    assert [segment.version for segment in first.segments] == [0]
    assert second.parent == first.step_id
    prompts = full_prompts([first, second])
    assert list(unpack_ids(prompts[second.step_id])) == [*LONG, 1]
    (end,) = ends(gateway, uid)
    assert (end.steps, end.channel, end.status) == (2, "val", "completed")


def test_the_last_step_closes_the_trajectory(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    submit(gateway, submitted(uid, prompt_uid, is_last=True))
    assert chat(gateway, uid, prompt_uid).status == 409
    assert submit(gateway, submitted(uid, prompt_uid, 1)).status == 409
    assert len(steps(gateway, uid)) == 1


def test_steps_without_logprobs_are_marked(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    submit(gateway, submitted(uid, prompt_uid, rollout_log_probs=None))
    step = only_step(gateway, uid)
    assert "rollout_log_probs" in (step.not_trainable or "")
    assert all(math.isnan(value) for value in unpack_logprobs(step.response_logprobs))


def test_the_sampling_parameters_of_submitted_steps_are_kept(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    """The trainer divides logits by the temperature; without it ratios would be wrong."""
    sampling = {"temperature": 0.7, "top_p": 1, "top_k": None, "max_tokens": 9, "other": "x"}
    submit(gateway, submitted(uid, prompt_uid, sampling=sampling))
    step = only_step(gateway, uid)
    assert step.not_trainable is None
    del sampling["top_k"]
    assert json.loads(step.sampling) == sampling


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"temperature": 0}],
)
def test_submitted_steps_of_another_distribution_are_marked_like_captured_calls(
    gateway: RunningGateway, uid: str, prompt_uid: str, sampling: dict[str, Any]
) -> None:
    submit(gateway, submitted(f"{uid}-own", prompt_uid, sampling=sampling))
    chat(gateway, uid, prompt_uid, **sampling)
    captured = only_step(gateway, uid).not_trainable
    assert only_step(gateway, f"{uid}-own").not_trainable == captured
    assert next(iter(sampling)) in (captured or "")


@pytest.mark.parametrize("last", [False, True])
def test_an_equal_submission_again_is_folded(
    gateway: RunningGateway, uid: str, prompt_uid: str, last: bool
) -> None:
    """A client whose connection broke sends it again."""
    batch = [submitted(uid, prompt_uid, 0), submitted(uid, prompt_uid, 1, is_last=last)]
    assert submit(gateway, *batch).body == {"accepted": 2}
    again = submit(gateway, *batch)
    assert (again.status, again.body) == (200, {"accepted": 2})
    assert len({step.step_id for step in steps(gateway, uid)}) == 2
    assert len(ends(gateway, uid)) == (1 if last else 0)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"rollout_log_probs": [-0.5]}, 422),
        ({"rollout_log_probs": []}, 422),
        ({"rollout_log_probs": [1e999, -1]}, (400, 422)),
        ({"rollout_log_probs": [-3e38, -1]}, 422),
        ({"rollout_log_probs": [-9999.0, -1]}, 422),
        ({"rollout_log_probs": [0.5, -1]}, 422),
        ({"policy_version": 3}, 422),
        ({"prompt_uid": "another-prompt"}, (400, 422)),
        ({"response_ids": []}, 400),
        ({"response_ids": [-1, 2]}, 400),
        ({"prompt_ids": "x"}, 400),
        ({"trajectory_uid": ""}, 400),
        ({"step_index": -1}, 400),
        ({"metadata": [1]}, 400),
        ({"reward": "x"}, 400),
        ({"sampling": {"temperature": "hot"}}, 400),
        ({"sampling": {"temperature": -1}}, 400),
        ({"sampling": [0.7]}, 400),
    ],
)
def test_all_steps_are_taken_or_none(
    gateway: RunningGateway, uid: str, prompt_uid: str, wrong: Any, status: Any
) -> None:
    reply = submit(gateway, submitted(uid, prompt_uid, 0), submitted(uid, prompt_uid, 1) | wrong)
    assert reply.status in (status if isinstance(status, tuple) else (status,)), reply
    error(reply)
    assert log_of(gateway, uid) == []


def test_none_are_taken_if_one_trajectory_is_closed(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    submit(gateway, submitted(f"{uid}-closed", prompt_uid, is_last=True))
    reply = submit(gateway, submitted(uid, prompt_uid), submitted(f"{uid}-closed", prompt_uid, 1))
    assert reply.status == 409
    assert log_of(gateway, uid) == []


@pytest.mark.parametrize("body", [{}, {"steps": []}, {"steps": {}}, [], {"steps": [1]}])
def test_a_body_without_steps_is_400(gateway: RunningGateway, body: Any) -> None:
    reply = gateway.post("/submit_steps", body)
    assert reply.status == 400
    error(reply)


def test_calls_and_submitted_steps_share_a_trajectory(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    submit(gateway, submitted(uid, prompt_uid, 5))
    chat(gateway, uid, prompt_uid)
    assert [step.step_index for step in steps(gateway, uid)] == [0, 5, 6]


# compute_reward

ASKED = {"prompt_ids": [1], "response_ids": [2], "num_turns": 1, "extra_fields": {"a": "é"}}


class Worker(BaseHTTPRequestHandler):
    """Answers what the request asks for."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = body.get("extra_fields", {}).get("status", 200)
        known = {"reward_score": 0.5, "reward_extra_info": {"path": self.path, "body": body}}
        answer = json.dumps(known).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def rewarding(log: Connection, stub: StubEngine, tokenizer: Path) -> Iterator[RunningGateway]:
    with HTTPServer(("127.0.0.1", 0), Worker) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        with running_gateway(log, [stub.url], tokenizer, "--reward", url) as running:
            yield running
        server.shutdown()
        thread.join()


def test_without_a_reward_worker_computing_is_503(gateway: RunningGateway) -> None:
    reply = gateway.post("/compute_reward", ASKED)
    assert reply.status == 503
    assert "--reward" in error(reply)["message"]


def test_a_reward_is_computed_by_the_worker(rewarding: RunningGateway) -> None:
    reply = rewarding.post("/compute_reward", ASKED)
    assert reply.status == 200
    assert reply.body["reward_score"] == 0.5
    assert reply.body["reward_extra_info"] == {"path": "/compute_reward", "body": ASKED}


@pytest.mark.parametrize(("status", "told"), [(400, 422), (422, 422), (500, 502), (404, 502)])
def test_a_worker_that_refuses_or_fails_is_told_as_such(
    rewarding: RunningGateway, status: int, told: int
) -> None:
    reply = rewarding.post("/compute_reward", {"extra_fields": {"status": status}})
    assert reply.status == told
    error(reply)
