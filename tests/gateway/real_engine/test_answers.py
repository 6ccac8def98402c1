"""What was sampled, what the client is told of it, and what the log has."""

import json
from typing import Any

import openai
import pytest

from tests.gateway.client import HELLO, ids_of, log_of, prompts, response, steps
from tests.gateway.real_engine.calls import (
    REAL,
    TOOL,
    ask,
    logprobs,
    rendered,
    say,
    streamed,
)
from tests.gateway.running import RunningGateway
from tests.tiny_model import EOS
from tests.vllm_engine import Engine

pytestmark = REAL

ODD = 'naïve "q" \\ \t\n\n한국 👩\u200d🚀 e\u0301 \u2028 </p> {{x}} \x7f'
END = "<|im_end|>"
FRAME = ids_of("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
"""What the template has around one message."""
WITH_AND_WITHOUT_TOOLS = pytest.mark.parametrize(
    "tools", [{}, {"tools": [TOOL]}], ids=["text", "tools"]
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_has_the_ids_and_logprobs_that_vllm_samples(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str, stream: bool
) -> None:
    call = streamed if stream else ask
    call(client, seed=7, temperature=0.7, max_tokens=48)
    (step,) = steps(gateway, uid)
    (prompt,) = prompts(gateway, uid)
    sampling = json.loads(step.sampling) | {"logprobs": 0}
    again = engine.post(
        "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling}
    )
    (choice,) = again["choices"]
    assert response(step) == choice["token_ids"]
    theirs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs(step) == pytest.approx(theirs, abs=1e-4)
    assert len(theirs) == 48
    assert step.finish_reason == "length"
    assert step.not_trainable is None


def test_the_end_of_turn_is_kept(gateway: RunningGateway, client: openai.OpenAI, uid: str) -> None:
    answer = ask(client, seed=1, extra_body={"allowed_token_ids": [ord("a"), EOS]})
    (step,) = steps(gateway, uid)
    *text, last = response(step)
    assert last == EOS
    assert answer.choices[0].message.content == "a" * len(text)
    assert answer.choices[0].finish_reason == step.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(text) + 1 == len(logprobs(step))


@WITH_AND_WITHOUT_TOOLS
def test_an_answer_that_ends_at_once_is_empty(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, tools: Any
) -> None:
    for call in (ask, streamed):
        answer = call(client, extra_body={"allowed_token_ids": [EOS]}, **tools)
        assert answer.choices[0].message.content == ""
        assert answer.choices[0].finish_reason == "stop"
    assert [response(step) for step in steps(gateway, uid)] == [[EOS], [EOS]]


def test_whole_and_streamed_are_the_same_answer(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    """Noise has bytes that are no text, which a stream must not cut otherwise than a whole."""
    for seed in range(5):
        whole = ask(client, seed=seed, max_tokens=60)
        parts = list(ask(client, seed=seed, max_tokens=60, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content
        one, two = steps(gateway, uid)[-2:]
        assert response(one) == response(two)
        assert logprobs(one) == pytest.approx(logprobs(two), abs=1e-4)
        assert len(parts) > 3  # it came bit by bit; a busy vLLM joins tokens


def test_what_was_not_asked_for_is_not_in_the_answer(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=5).to_dict()
    head = {"id", "object", "created", "model", "choices"}
    assert set(whole) == head | {"system_fingerprint", "usage"}
    assert whole["choices"][0].get("logprobs") is None
    assert set(whole["choices"][0]) <= {"index", "message", "finish_reason", "logprobs"}
    for part in ask(client, max_tokens=5, stream=True):
        told = part.to_dict()
        is_last = told["choices"][0]["finish_reason"] is not None
        assert set(told) == head | ({"system_fingerprint"} if is_last else set())
        assert set(told["choices"][0]) == {"index", "delta", "finish_reason"}


@WITH_AND_WITHOUT_TOOLS
def test_what_was_asked_for_is_what_the_log_has(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, tools: Any
) -> None:
    wanted: Any = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12, "seed": 3} | tools
    wanted["extra_body"] = {"return_token_ids": True}
    answer = ask(client, **wanted)
    (choice,) = answer.choices
    (step,) = steps(gateway, uid)
    assert [answer.prompt_token_ids] == prompts(gateway, uid)
    assert choice.token_ids == response(step)
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(logprobs(step))
    assert all(len(entry.top_logprobs) >= 2 for entry in choice.logprobs.content)

    parts = [part.choices[0] for part in ask(client, **wanted, stream=True)]
    ids = [token_id for part in parts for token_id in getattr(part, "token_ids", None) or ()]
    assert ids == choice.token_ids
    told = [entry.logprob for part in parts if part.logprobs for entry in part.logprobs.content]
    assert told == pytest.approx(logprobs(step), abs=1e-4)


@pytest.mark.parametrize(
    ("stop", "text", "sampled"),
    [(".", "a", b"a."), ("...", "a", b"a..."), (["x", ".b"], "a..", b"a...b")],
)
@WITH_AND_WITHOUT_TOOLS
def test_a_stop_string_is_in_the_log_and_not_in_the_text(
    gateway: RunningGateway,
    client: openai.OpenAI,
    uid: str,
    stop: Any,
    text: str,
    sampled: bytes,
    tools: Any,
) -> None:
    for call in (ask, streamed):
        answer = call(client, stop=stop, **say("a...b..."), **tools)
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == "stop"
        assert response(steps(gateway, uid)[-1]) == list(sampled)


@pytest.mark.parametrize(
    "options",
    [
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
        {"stop_token_ids": [ord("b")]},
        {"stop_token_ids": [ord("b")], "include_stop_str_in_output": True},
        {"stop": "b", "include_stop_str_in_output": True},
    ],
)
@WITH_AND_WITHOUT_TOOLS
def test_an_end_is_in_the_text_where_vllm_has_it(
    engine: Engine, client: openai.OpenAI, options: Any, tools: Any
) -> None:
    asked = options | {"allowed_token_ids": [ord("a"), ord("b"), EOS]}
    for seed in range(3):
        body = {"messages": HELLO, "seed": seed} | asked | tools
        (theirs,) = engine.post("/v1/chat/completions", body)["choices"]
        for call in (ask, streamed):
            (ours,) = call(client, seed=seed, extra_body=asked, **tools).choices
            # With tools vLLM also tells the end of turn, which is none of its client's business.
            text = theirs["message"]["content"] or ""
            assert (ours.message.content or "") == (text.removesuffix(END) if tools else text)
            assert ours.finish_reason == theirs["finish_reason"] == "stop"


@WITH_AND_WITHOUT_TOOLS
def test_odd_characters_survive(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str, tools: Any
) -> None:
    messages = [{"role": "system", "content": ODD}, {"role": "user", "content": ODD}]
    for call in (ask, streamed):
        answer = call(client, messages, **say(ODD), **tools)
        assert answer.choices[0].message.content == ODD
        step = steps(gateway, uid)[-1]
        assert response(step) == [*ODD.encode(), EOS]
    for prompt in prompts(gateway, uid):
        assert prompt == rendered(engine, messages, **tools)


@pytest.mark.parametrize("length", [1024, 3000])
@pytest.mark.parametrize(
    "options", [{}, {"max_tokens": 1, "stream": True}, {"tools": [TOOL], "stream": True}]
)
def test_a_prompt_that_is_too_long_is_the_clients_mistake(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, length: int, options: Any
) -> None:
    content = "a" * (length - len(FRAME))
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, [{"role": "user", "content": content}], **options)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.type == "invalid_request_error"
    assert log_of(gateway, uid) == []
    assert gateway.get("/ready").status == 200


def test_token_level_clients_get_what_the_log_has(gateway: RunningGateway, engine: Engine) -> None:
    """In vLLM's own shape, which its server no longer has: answers, and what it thinks of a prompt."""
    prompt = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    asked = {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "max_tokens": 6, "seed": 3}
    told = gateway.post("/generate", asked).body
    sampling = {"max_tokens": 6, "seed": 3, "logprobs": 0}
    again = engine.post(
        "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling}
    )
    (choice,) = again["choices"]
    assert told["token_ids"] == [choice["token_ids"]]
    theirs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    ours = [next(iter(token[0].values())) for token in told["logprobs"][0]]
    assert ours == pytest.approx(theirs, abs=1e-4)

    asked = {"prompt": {"prompt_token_ids": prompt}, "prompt_logprobs": 2, "max_tokens": 1}
    first, *others = gateway.post("/generate", asked).body["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    assert all(str(id_) in at for id_, at in zip(prompt[1:], others, strict=True))
