"""Calls by the real clients: what they are told, and what the log has afterwards."""

from typing import Any

import pytest

from schemas.packing import unpack_ids, unpack_logprobs
from tests.gateway.running import RunningGateway
from tests.gateway.stub_engine import StubEngine
from tests.tiny_model import EOS

pytestmark = pytest.mark.broker

HELLO: Any = [{"role": "user", "content": "hello"}]


def test_a_call_is_a_step_with_the_sampled_ids(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([{"ids": [*b"well", EOS], "logprobs": [-0.5, -0.25, -2.0, -1.0, -0.125]}])
    answer = gateway.openai(uid, prompt_uid).chat.completions.create(
        model="default", messages=HELLO
    )
    assert answer.choices[0].message.content == "well"
    assert answer.choices[0].finish_reason == "stop"
    (step,) = gateway.steps(uid)
    assert list(unpack_ids(step.response_ids)) == [*b"well", EOS]
    assert list(unpack_logprobs(step.response_logprobs)) == [-0.5, -0.25, -2.0, -1.0, -0.125]
    assert answer.id == f"chatcmpl-{step.step_id}"
    assert (step.step_index, step.prompt_uid, step.channel) == (0, prompt_uid, "train")
