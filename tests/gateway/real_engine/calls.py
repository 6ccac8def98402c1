"""Calls to a gateway in front of the real vLLM.

The model is tiny and random. A test that needs certain words has the engine hold it to them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import openai
import pytest

from schemas import Step
from schemas.packing import unpack_logprobs
from tests.gateway.client import HELLO, prompts, response, steps
from tests.gateway.running import RunningGateway
from tests.tiny_model import saying
from tests.vllm_engine import NAME, Engine

REAL = [
    pytest.mark.slow,
    pytest.mark.broker,
    pytest.mark.timeout(900),  # the first test waits for vLLM
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make setup-cpu"),
]
"""The marks of all these tests."""

FUNCTION: Any = {
    "name": "f",
    # vLLM writes a null in the place of a description that is missing, and the ids would differ.
    "description": "counts",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    },
}
TOOL: Any = {"type": "function", "function": FUNCTION}
CALLING = '<think>a b</think>hi<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>'
NO_WHITE_SPACE = {"logit_bias": {str(ord(space)): -100 for space in " \t\n\r"}}
"""A random model that may fill JSON with white space does so until it is cut."""
LONG = 900
TRIES = 12


def ask(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="default", messages=messages, **options)


def streamed(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> Any:
    """The answer, put together again by the client."""
    with client.chat.completions.stream(model="default", messages=messages, **options) as events:
        for _ in events:
            pass
        return events.current_completion_snapshot


@contextmanager
def paused_in_the_middle(
    gateway: RunningGateway, engine: Engine, tokens: int = LONG
) -> Iterator[tuple[str, Any]]:
    """A trajectory and the stream of its answer, which the engine has begun and does not go on with. It
    often takes all cores until it is done, its own server's too; then it is asked again."""
    options: Any = {"max_tokens": tokens, "stream": True}
    options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    for _ in range(TRIES):
        uid = f"t-{uuid4().hex[:12]}"
        stream = ask(gateway.openai(uid, f"p-{uid}"), **options)
        next(iter(stream))
        with engine.paused():
            if engine.requests():
                yield uid, stream
                return
        stream.close()
    pytest.fail(f"the engine was done before it could be paused, {TRIES} times")


def say(text: str, spelled: bool = False, **more: Any) -> dict[str, Any]:
    """Options of a call whose answer is this."""
    return {"max_tokens": 400, "extra_body": saying(text, spelled) | more}


def logprobs(step: Step) -> list[float]:
    return list(unpack_logprobs(step.response_logprobs))


def sequences(gateway: RunningGateway, uid: str) -> list[list[int]]:
    """Each Step's prompt and response."""
    found = steps(gateway, uid)
    return [p + response(s) for p, s in zip(prompts(gateway, uid), found, strict=True)]


def assert_extended(gateway: RunningGateway, uid: str, count: int) -> None:
    """Each prompt begins with the whole of the Step before, and is stored as what it adds."""
    found = steps(gateway, uid)
    assert len(found) == count
    for before, prompt in zip(sequences(gateway, uid), prompts(gateway, uid)[1:], strict=False):
        assert prompt[: len(before)] == before
    assert [step.parent for step in found] == [None, *(step.step_id for step in found[:-1])]


def rendered(engine: Engine, messages: Any, tools: Any = None) -> list[int]:
    """What vLLM itself would give the model."""
    body = {"model": NAME, "messages": messages} | ({"tools": tools} if tools else {})
    ids: list[int] = engine.post("/v1/chat/completions/render", body)["token_ids"]
    return ids
