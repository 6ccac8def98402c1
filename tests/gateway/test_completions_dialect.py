"""/completions: parsed, answered and streamed, with OpenAI's own client as the judge."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIError, OpenAI
from openai.types import Completion

from gateway.dialects.completions import Completions, CompletionsBody
from gateway.dialects.request import AnswerDelta, Request, TokenLogprob
from gateway.errors import ApiError, BadRequest
from tests.gateway.dialects import ANSWERS, STEP, Served, an_answer, bodies, replying, streamed

VALID: dict[str, Any] = {"prompt": "Once upon"}
FULL = VALID | {
    "model": "m",
    "logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["a", "b"],
    "logit_bias": {"5": 1.0},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
}
TOKENS = [
    TokenLogprob(
        id=5, token="Hel", logprob=-0.5, top=[TokenLogprob(id=6, token="Hal", logprob=-1)]
    ),
    TokenLogprob(id=7, token="lo", logprob=-0.25),
]


def parsed(**changed: Any) -> Request:
    return Completions().parse(json.dumps(VALID | changed).encode())


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a", "a"), (["a"], "a"), ([3, 4], [3, 4]), ([[3, 4]], [3, 4]), ([3], [3])],
)
def test_one_prompt_comes_in_many_shapes(prompt: Any, found: Any) -> None:
    assert parsed(prompt=prompt).prompt == found


def test_settings_reach_the_engine() -> None:
    request = parsed(max_tokens=5, stop="x", seed=1, stream_options={"include_usage": True})
    assert request.sampling == {"max_tokens": 5, "stop": ["x"], "seed": 1}
    assert request.include_usage
    assert parsed().sampling == {"max_tokens": 16}
    assert not parsed().logprobs
    assert parsed(logprobs=0).logprobs
    assert parsed(logprobs=3).top_logprobs == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": None},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"prompt": ["a", "b"]},
        {"prompt": [1, "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [True]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": [1.5]},
        {"prompt": {"a": 1}},
        {"echo": True},
        {"best_of": 2},
        {"n": 2},
        {"suffix": "end"},
        {"logprobs": 21},
        {"logprobs": True},
        {"stream": "yes"},
        {"max_tokens": 0},
        {"stop": [""]},
    ],
)
def test_a_body_that_cannot_be_served_is_told_so(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as told:
        parsed(**wrong)
    assert str(told.value)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"prompt":"\xff"}', b'{"stop":' + b"[" * 5000 + b"]" * 5000 + b"}"]
)
def test_bytes_that_are_no_body_are_told_so(body: bytes) -> None:
    with pytest.raises(BadRequest):
        Completions().parse(body)


@given(bodies(FULL, CompletionsBody.__struct_fields__))
def test_only_api_errors_come_out_of_any_object(body: dict[str, Any]) -> None:
    try:
        request = Completions().parse(json.dumps(body).encode())
    except ApiError:
        return
    Completion.model_validate_json(Completions().answer(request, an_answer()))


@given(st.binary(max_size=40))
def test_only_api_errors_come_out_of_any_bytes(body: bytes) -> None:
    with pytest.raises(ApiError):
        Completions().parse(body)


@pytest.mark.parametrize("name", ["text", "empty", "cut"])
def test_the_client_reads_the_answer_whole_and_streamed(name: str) -> None:
    answer = ANSWERS[name]
    served = Served(Completions(), answer)
    with OpenAI(api_key="k", base_url="http://gateway/v1", http_client=served.http) as client:
        whole = client.completions.create(model="m", prompt="p")
        chunks = list(client.completions.create(model="m", prompt="p", stream=True))
    Completion.model_validate_json(Completions().answer(served.requests[0], answer))
    assert (whole.id, whole.object, whole.created) == (
        f"cmpl-{STEP}",
        "text_completion",
        answer.created,
    )
    assert whole.choices[0].text == answer.content
    assert whole.choices[0].finish_reason == answer.finish_reason
    assert whole.usage and whole.usage.total_tokens == 18
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.content
    assert {chunk.id for chunk in chunks} == {whole.id}
    assert chunks[-1].choices[0].finish_reason == answer.finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_ends_the_stream_if_asked() -> None:
    served = Served(Completions(), an_answer())
    with OpenAI(api_key="k", base_url="http://gateway/v1", http_client=served.http) as client:
        asked = client.completions.create(
            model="m", prompt="p", stream=True, stream_options={"include_usage": True}
        )
        last = list(asked)[-1]
    assert last.choices == []
    assert last.usage and last.usage.completion_tokens == 7


def test_logprobs_are_in_the_old_shape() -> None:
    answer = an_answer("Hello", logprobs=TOKENS)
    told = msgspec.json.decode(Completions().answer(parsed(logprobs=1), answer))
    assert told["choices"][0]["logprobs"] == {
        "tokens": ["Hel", "lo"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"Hal": -1.0, "Hel": -0.5}, {"lo": -0.25}],
        "text_offset": [0, 3],
    }
    unasked = msgspec.json.decode(Completions().answer(parsed(), answer))
    assert unasked["choices"][0]["logprobs"] is None


def test_offsets_go_on_through_a_stream() -> None:
    told = [
        AnswerDelta(content=token.token, logprobs=[token], token_ids=[token.id]) for token in TOKENS
    ]
    request = parsed(logprobs=1, return_token_ids=True, stream=True)
    answer = an_answer("Hello", prompt_ids=[1, 2])
    lines = streamed(Completions(), request, answer, *told).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    assert [choice["logprobs"]["text_offset"] for choice in choices[:2]] == [[0], [3]]
    assert [choice["token_ids"] for choice in choices[:2]] == [[5], [7]]
    assert choices[2]["prompt_token_ids"] == [1, 2]


def test_ids_are_told_if_asked() -> None:
    answer = an_answer(token_ids=[7], prompt_ids=[1, 2])
    told = msgspec.json.decode(Completions().answer(parsed(return_token_ids=True), answer))
    assert told["choices"][0]["token_ids"] == [7]
    assert told["choices"][0]["prompt_token_ids"] == [1, 2]
    assert b"token_ids" not in Completions().answer(parsed(), answer)


def test_an_error_in_a_stream_reaches_the_client() -> None:
    writer = Completions().writer(parsed(), STEP, 1, "m")
    http = replying(writer.begin() + writer.error("The engine is gone.", "server_error"))
    with (
        OpenAI(api_key="k", base_url="http://gateway/v1", http_client=http) as client,
        pytest.raises(APIError, match="The engine is gone"),
    ):
        list(client.completions.create(model="m", prompt="p", stream=True))
