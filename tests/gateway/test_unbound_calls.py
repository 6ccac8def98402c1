"""Environments that know one URL only: what they ask is answered in their words, and recorded."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pool.connection import Connection
from pool.topics import STEPS
from schemas import Record, Step, TrajectoryEnd
from schemas.packing import unpack_ids
from tests.gateway.client import HELLO, error, eventually, response, said
from tests.gateway.running import Reply, RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.log import records
from tests.tiny_model import EOS

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def recording(log: Connection, stub: StubEngine, tokenizer: Path) -> Iterator[RunningGateway]:
    with running_gateway(log, [stub.url], tokenizer, "--unbound-channel", "envs") as running:
        yield running


def recorded(gateway: RunningGateway, sent: str) -> tuple[list[Step], list[TrajectoryEnd]]:
    """What the log has of a request; its prompt_uid is made from the bytes that were sent."""
    digest = hashlib.blake2b(sent.encode(), digest_size=12).hexdigest()

    def found() -> list[Record]:
        everything = records(gateway.connection, STEPS)
        mine = [record for record in everything if getattr(record, "prompt_uid", "") == digest]
        ended = [record for record in mine if isinstance(record, TrajectoryEnd)]
        return mine if len(ended) * 2 == len(mine) else []

    mine = eventually(found)
    return (
        [record for record in mine if isinstance(record, Step)],
        [record for record in mine if isinstance(record, TrajectoryEnd)],
    )


def ask(gateway: RunningGateway, path: str, body: Any) -> Reply:
    reply = gateway.post(path, body)
    assert reply.status == 200, reply
    return reply


def test_each_sample_of_an_unbound_call_is_a_closed_trajectory(
    recording: RunningGateway, stub: StubEngine
) -> None:
    stub.script([said("one"), said("two"), said("six")])
    body = {"messages": HELLO, "max_tokens": 50}
    several = ask(recording, "/v1/chat/completions", body | {"n": 3}).body
    spoken = [choice["message"]["content"] for choice in several["choices"]]
    assert sorted(spoken) == ["one", "six", "two"]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert several["usage"]["completion_tokens"] == 12
    # The gateway writes the request of one sample itself, without spaces.
    found, ended = recorded(recording, json.dumps(body, separators=(",", ":")))
    assert {bytes(response(step)[:3]).decode() for step in found} == {"one", "two", "six"}
    assert len({step.trajectory_uid for step in found}) == 3
    assert {(end.channel, end.status, end.reward) for end in ended} == {("envs", "completed", None)}


def test_a_probe_is_not_recorded(recording: RunningGateway) -> None:
    """Some clients send one every second, for ever."""
    before = recording.metric("steps_published_total")
    ask(recording, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1})
    ask(recording, "/v1/completions", {"prompt": "hi", "max_tokens": 1})
    assert recording.metric("steps_published_total") == before


def test_without_the_setting_such_calls_are_refused(gateway: RunningGateway) -> None:
    reply = gateway.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 50})
    assert reply.status == 400
    assert "--unbound-channel" in error(reply)["message"]


def test_what_is_unbound_is_never_trained(
    log: Connection, stub: StubEngine, tokenizer: Path
) -> None:
    options = ("--unbound-channel", "train")
    with running_gateway(log, [stub.url], tokenizer, *options, wait=False) as refused:
        assert refused.process.wait(60) == 2
        assert "choose another channel" in refused.log.read_text()


def test_vllms_generate(gateway: RunningGateway, stub: StubEngine) -> None:
    """The shape that token-level environments read: for each token a list, its first entry the
    sampled one."""
    answer = {"ids": [65, 66, EOS], "logprobs": [-0.5, -0.25, -0.125]}
    stub.script([answer, answer])
    body = {
        "prompt": {"prompt_token_ids": [1, 2, 3]},
        "logprobs": 0,
        "n": 2,
        "max_tokens": 9,
        "temperature": 0.5,
    }
    told = ask(gateway, "/generate", body).body
    tokens = [[{"65": -0.5}], [{"66": -0.25}], [{str(EOS): -0.125}]]
    assert told["logprobs"] == [tokens, tokens]
    assert told["token_ids"] == [[65, 66, EOS]] * 2
    assert told["finish_reasons"] == ["stop", "stop"]
    assert told["text"] == ["AB", "AB"]
    found, ended = recorded(gateway, json.dumps(body))
    assert len(found) == len(ended) == 2
    assert {end.channel for end in ended} == {"unbound"}
    assert list(unpack_ids(found[0].prompt_ids)) == [1, 2, 3]
    assert json.loads(found[0].sampling) == {"max_tokens": 9, "temperature": 0.5}


def test_sglangs_generate(gateway: RunningGateway, stub: StubEngine) -> None:
    stub.script([{"ids": [65, EOS], "logprobs": [-0.5, -0.25], "finish_reason": "length"}])
    body = {
        "input_ids": [3, 2, 1],
        "sampling_params": {"max_new_tokens": 2, "top_k": 5},
        "return_logprob": True,
        "return_text_in_logprobs": False,
    }
    told = ask(gateway, "/generate", body).body
    about = told["meta_info"]
    assert about["output_token_logprobs"] == [[-0.5, 65, None], [-0.25, EOS, None]]
    assert about["finish_reason"] == {"type": "length"}
    (step,), _ = recorded(gateway, json.dumps(body))
    assert response(step) == [65, EOS]
    assert json.loads(step.sampling) == {"max_tokens": 2, "top_k": 5}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": {"prompt_token_ids": []}},
        {"prompt": {"prompt_token_ids": [-1]}},
        {"prompt": 5},
        {"prompt": "text", "n": 0},
        {"prompt": "text", "n": 1000},
        {"prompt": "text", "stream": True},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}},
        {"text": ""},
    ],
)
def test_what_cannot_be_generated_is_one_sentence(gateway: RunningGateway, body: Any) -> None:
    before = gateway.metric("steps_published_total")
    reply = gateway.post("/generate", body)
    assert reply.status == 400
    error(reply)
    assert gateway.metric("steps_published_total") == before
