"""Calls by the real clients: what they are told, and what the log has afterwards."""

import json
from typing import Any

import pytest

from pool.topics import STEPS
from schemas.packing import unpack_ids, unpack_logprobs
from tests.gateway.client import (
    HELLO,
    RETRY,
    TOOLS,
    Streaming,
    asked,
    call,
    chat,
    error,
    ids_of,
    only_step,
    prompts,
    response,
    said,
    steps,
    text,
)
from tests.gateway.running import RunningGateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.log import messages
from tests.tiny_model import EOS

pytestmark = pytest.mark.broker

CHANGED_WEIGHTS = [
    {"version": "1.3", "start": 0, "end": 2},
    {"version": "1.4", "start": 2, "end": 3},
]
"""What an engine says of an answer of three tokens that an update interrupted."""
LOOK = call("look", '{"at":"home"}')


def test_a_call_is_a_step_with_the_sampled_ids(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([{"ids": [*b"well", EOS], "logprobs": [-0.5, -0.25, -2.0, -1.0, -0.125]}])
    answer = gateway.openai(uid, prompt_uid).chat.completions.create(
        model="default", messages=HELLO
    )
    assert answer.choices[0].message.content == "well"
    assert answer.choices[0].finish_reason == "stop"
    step = only_step(gateway, uid)
    assert list(unpack_ids(step.response_ids)) == [*b"well", EOS]
    assert list(unpack_logprobs(step.response_logprobs)) == [-0.5, -0.25, -2.0, -1.0, -0.125]
    assert answer.id == f"chatcmpl-{step.step_id}"
    assert (step.step_index, step.prompt_uid, step.channel) == (0, prompt_uid, "train")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(asked(stub)[0]), 5)


@pytest.mark.parametrize("stream", [False, True])
def test_of_two_tool_calls_a_client_that_wants_one_gets_the_first_and_the_step_has_both(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool
) -> None:
    """The next call continues what was sampled: the model sees both calls, and one result."""
    two = said("I look." + LOOK + "\n" + call("look", '{"at":"work"}'), chunk=7)
    stub.script([two, said("nobody is there")])
    options: Any = {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
    message = _message(gateway, uid, prompt_uid, HELLO, **options)
    assert message["content"] == "I look."
    (first,) = message["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"at": "home"}
    result = {"role": "tool", "tool_call_id": first["id"], "content": "nothing"}
    _message(gateway, uid, prompt_uid, [*HELLO, message, result], **options)
    one, next_ = steps(gateway, uid)
    assert response(one) == two["ids"]
    before, after = prompts(gateway, uid)
    assert after[: len(before) + len(two["ids"])] == before + two["ids"]
    assert (next_.parent, one.not_trainable) == (one.step_id, None)


def _message(
    gateway: RunningGateway, uid: str, prompt_uid: str, messages: Any, **options: Any
) -> Any:
    """The message that a client sends back, from an answer or its stream."""
    with gateway.openai(uid, prompt_uid) as client:
        if not options.pop("stream"):
            answer = client.chat.completions.create(model="", messages=messages, **options)
            return answer.choices[0].message.model_dump(exclude_none=True)
        with client.chat.completions.stream(model="", messages=messages, **options) as events:
            answer = events.get_final_completion()
            return answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})


def test_without_traces_a_record_carries_nothing_of_the_agents_trace(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    base = f"/{uid}/{prompt_uid}/v1"
    assert gateway.post(f"{base}/chat/completions", {"messages": HELLO}, trace).status == 200
    assert gateway.post(f"{base}/complete_trajectory", {}, trace).status == 200
    ours = [m for m in messages(gateway.connection, STEPS) if m.key == prompt_uid.encode()]
    assert [message.headers for message in ours] == [(), ()]


def test_a_stream_tells_the_same_as_a_whole_answer(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("well done", chunk=2)])
    stream = gateway.openai(uid, prompt_uid).chat.completions.create(
        model="default", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert told == "well done"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10
    step = only_step(gateway, uid)
    assert response(step) == [*b"well done", EOS]
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{step.step_id}"}
    assert {chunk.model for chunk in chunks} == {"tiny"}


def test_chunks_are_passed_on_as_they_come(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("abcdef", hold=1)])
    told = []
    for chunk in gateway.openai(uid, prompt_uid).chat.completions.create(
        model="", messages=HELLO, stream=True
    ):
        if chunk.choices[0].delta.content:
            told.append(chunk.choices[0].delta.content)
            stub.release()  # the engine says no more before the first was heard
    assert "".join(told) == "abcdef"


def test_the_end_of_a_stream_comes_after_the_step_is_in_the_log(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("abc", hold=1)])
    seen = {}
    for chunk in gateway.openai(uid, prompt_uid).chat.completions.create(
        model="", messages=HELLO, stream=True
    ):
        told = chunk.choices[0].finish_reason or chunk.choices[0].delta.content
        seen[told] = len(steps(gateway, uid))
        if told == "a":
            stub.release()
    assert seen["a"] == 0
    assert seen["stop"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_what_the_engines_parser_says(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool
) -> None:
    stub.script([said(f"I look.{LOOK}", chunk=3)])
    completions = gateway.openai(uid, prompt_uid).chat.completions
    if stream:
        with completions.stream(model="", messages=HELLO, tools=TOOLS) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = completions.create(model="", messages=HELLO, tools=TOOLS)
    message = answer.choices[0].message
    assert message.content == "I look."
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("look", {"at": "home"})
    ]
    assert all(c.id and c.type == "function" for c in message.tool_calls)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert response(only_step(gateway, uid)) == [*ids_of(f"I look.{LOOK}"), EOS]


def test_an_answer_of_calls_alone_has_no_content(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said(LOOK + "\n" + call("look", '{"at":"work"}'))])
    reply = chat(gateway, uid, prompt_uid, tools=TOOLS)
    message = reply.body["choices"][0]["message"]
    assert message["content"] is None
    assert [json.loads(c["function"]["arguments"])["at"] for c in message["tool_calls"]] == [
        "home",
        "work",
    ]


def test_without_tools_a_call_stays_text(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said(LOOK)])
    assert text(chat(gateway, uid, prompt_uid)) == LOOK


def test_tools_reach_the_template(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid, tools=TOOLS)
    assert b"Look it up." in bytes(i for i in asked(stub)[0] if i < 256)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_tool_is_the_engines_to_enforce_and_not_to_be_trained(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, choice: Any
) -> None:
    stub.script([said(LOOK)])
    reply = chat(gateway, uid, prompt_uid, tools=TOOLS, tool_choice=choice)
    assert reply.body["choices"][0]["finish_reason"] == "tool_calls"
    wanted = stub.requests()[-1]["sampling_params"]["structured_outputs"]["structural_tag"]
    assert json.loads(wanted) == {"choice": choice}
    assert "tool_choice" in (only_step(gateway, uid).not_trainable or "")


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_not_asked_for_is_not_in_the_answer(
    gateway: RunningGateway, uid: str, prompt_uid: str, stream: bool
) -> None:
    reply = chat(gateway, uid, prompt_uid, stream=stream)
    whole = reply.body if stream else json.dumps(reply.body)
    assert "token_ids" not in whole
    assert "usage" not in whole if stream else "usage" in whole
    assert '"logprob"' not in whole


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_ids_come_if_asked(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str, stream: bool, tools: Any
) -> None:
    stub.script([{"ids": [*b"ab", EOS], "logprobs": [-0.5, -0.25, -2.0]}])
    options: Any = {"tools": tools} if tools else {}
    answers: Any = gateway.openai(uid, prompt_uid).chat.completions.create(
        model="",
        messages=HELLO,
        logprobs=True,
        top_logprobs=1,
        stream=stream,
        extra_body={"return_token_ids": True},
        **options,
    )
    parts = list(answers) if stream else [answers]
    choices = [choice for part in parts for choice in part.choices]
    tokens = [t for choice in choices if choice.logprobs for t in choice.logprobs.content]
    assert [(t.token, t.logprob) for t in tokens] == [
        ("a", -0.5),
        ("b", -0.25),
        ("<|im_end|>", -2.0),
    ]
    assert [[top.token for top in t.top_logprobs] for t in tokens] == [["a"], ["b"], ["<|im_end|>"]]
    assert [i for choice in choices for i in getattr(choice, "token_ids", [])] == [*b"ab", EOS]
    given = [part.prompt_token_ids for part in parts if getattr(part, "prompt_token_ids", None)]
    assert given == asked(stub)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["STOP", "S"])
def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_ids(
    gateway: RunningGateway,
    stub: StubEngine,
    uid: str,
    prompt_uid: str,
    stream: bool,
    tools: Any,
    stop: str,
) -> None:
    stub.script([said(f"one {stop}", end=None, stop_reason=stop)])
    options: Any = {"tools": tools} if tools else {}
    answers: Any = gateway.openai(uid, prompt_uid).chat.completions.create(
        model="", messages=HELLO, stop=stop, stream=stream, **options
    )
    if stream:
        told = "".join(chunk.choices[0].delta.content or "" for chunk in answers)
    else:
        told = answers.choices[0].message.content
    assert told == "one "
    assert response(only_step(gateway, uid)) == list(f"one {stop}".encode())
    assert stub.requests()[-1]["sampling_params"]["stop"] == [stop]


def test_what_begins_like_a_stop_string_and_is_none_is_told(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("a STO b ST")])
    chunks = gateway.openai(uid, prompt_uid).chat.completions.create(
        model="", messages=HELLO, stop=["STOP"], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a STO b ST"


def test_a_character_of_several_tokens_is_told_whole(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([{"ids": [*"né€😀!".encode(), EOS], "chunk_delay": 0.01}])
    chunks = gateway.openai(uid, prompt_uid).chat.completions.create(
        model="", messages=HELLO, stream=True
    )
    told = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert told == ["n", "é", "€", "😀", "!"]


def test_half_a_character_at_the_end_is_told_alike_whole_and_streamed(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    cut = {"ids": [*"né".encode()[:2]], "finish_reason": "length"}
    stub.script([cut, cut])
    whole = text(chat(gateway, uid, prompt_uid))
    chunks = gateway.openai(uid, prompt_uid).chat.completions.create(
        model="", messages=HELLO, stream=True
    )
    told = list(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == whole
    assert whole.startswith("n")
    assert told[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("model", ["default", "", None])
def test_the_served_model_needs_no_name(
    gateway: RunningGateway, uid: str, prompt_uid: str, model: str | None
) -> None:
    assert chat(gateway, uid, prompt_uid, model=model).body["model"] == "tiny"
    assert only_step(gateway, uid).model == "tiny"


def test_a_developers_message_is_the_systems(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *HELLO]
    chat(gateway, uid, prompt_uid, messages)
    assert asked(stub)[0] == ids_of(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_tool_message_needs_no_tool_call_id(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    reply = chat(gateway, uid, prompt_uid, [*HELLO, {"role": "tool", "content": "forty-two"}])
    assert reply.status == 200
    assert b"forty-two" in bytes(i for i in asked(stub)[0] if i < 256)


def test_parts_of_text_are_joined(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(gateway, uid, prompt_uid, [{"role": "user", "content": parts}])
    assert b"one\ntwo" in bytes(i for i in asked(stub)[0] if i < 256)


PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"messages": [{"role": "user", "content": PICTURE}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_a_body_that_cannot_be_used_is_400_and_nothing_is_recorded(
    gateway: RunningGateway, uid: str, prompt_uid: str, body: Any, param: str
) -> None:
    path = f"/{uid}/{prompt_uid}/v1/chat/completions"
    reply = gateway.post(path, {"messages": HELLO, **body})
    assert reply.status == 400
    assert (error(reply)["param"] or "").startswith(param)
    assert gateway.post(f"/{uid}/{prompt_uid}/v1/complete_trajectory").status == 404


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": NaN}'])
def test_bytes_that_are_no_request_are_400(
    gateway: RunningGateway, uid: str, prompt_uid: str, body: bytes
) -> None:
    reply = gateway.post(f"/{uid}/{prompt_uid}/v1/chat/completions", body)
    assert reply.status == 400
    assert error(reply)["type"] == "invalid_request_error"


def test_a_refusal_of_the_template_is_400(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    reply = chat(gateway, uid, prompt_uid, chat_template_kwargs={"messages": 5})
    assert reply.status == 400


def test_settings_reach_the_engine(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    given: Any = {
        "max_tokens": 7,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 1.0},
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "min_tokens": 2,
        "ignore_eos": True,
        "bad_words": ["no"],
        "allowed_token_ids": [65, 66],
        "structured_outputs": {"regex": "a+"},
    }
    assert chat(gateway, uid, prompt_uid, **given).status == 200
    sent = stub.requests()[-1]["sampling_params"]
    assert sent == given | {"logprobs": 0}
    assert json.loads(only_step(gateway, uid).sampling) == given


@pytest.mark.parametrize(("asked", "used"), [(0.001, 0.01), (1e-6, 0.01), (0.01, 0.01), (0, 0)])
def test_a_step_has_the_temperature_that_the_engine_uses(
    gateway: RunningGateway,
    stub: StubEngine,
    uid: str,
    prompt_uid: str,
    asked: float,
    used: float,
) -> None:
    assert chat(gateway, uid, prompt_uid, temperature=asked).status == 200
    assert stub.requests()[-1]["sampling_params"]["temperature"] == used
    assert json.loads(only_step(gateway, uid).sampling)["temperature"] == used


def test_max_completion_tokens_and_response_format_reach_the_engine(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    chat(gateway, uid, prompt_uid, max_completion_tokens=9, response_format=wanted)
    sent = stub.requests()[-1]["sampling_params"]
    assert (sent["max_tokens"], sent["structured_outputs"]) == (9, {"json": schema})


@pytest.mark.parametrize(
    ("settings", "marked"),
    [
        ({"temperature": 0.7}, None),
        ({"temperature": 1, "top_p": 1.0, "top_k": -1}, None),
        ({"stop": ["x"], "max_tokens": 5, "seed": 1}, None),
        ({"temperature": 0}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"logit_bias": {"65": 5}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"allowed_token_ids": [65]}, "allowed_token_ids"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_settings_that_spoil_the_logprobs_are_served_and_marked(
    gateway: RunningGateway, uid: str, prompt_uid: str, settings: Any, marked: str | None
) -> None:
    assert chat(gateway, uid, prompt_uid, **settings).status == 200
    found = only_step(gateway, uid).not_trainable
    assert found is None if marked is None else marked in (found or "")


def test_a_token_without_a_logprob_marks_the_step(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([{"ids": [65, EOS], "logprobs": [-9999.0, -0.5]}])
    assert chat(gateway, uid, prompt_uid).status == 200
    assert "logprob" in (only_step(gateway, uid).not_trainable or "")


@pytest.mark.parametrize(
    ("spans", "segments"),
    [
        ([{"version": "1.3", "start": 0, "end": 3}], [(1, 3, 0)]),
        (CHANGED_WEIGHTS, [(1, 3, 0), (1, 4, 2)]),
        ([{"version": "default", "start": 0, "end": 3}], [(0, 0, 0)]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_segments_say_which_weights_sampled_which_tokens(
    gateway: RunningGateway,
    stub: StubEngine,
    uid: str,
    prompt_uid: str,
    stream: bool,
    spans: Any,
    segments: Any,
) -> None:
    stub.script([said("ab", weight_versions=spans)])
    chat(gateway, uid, prompt_uid, stream=stream)
    found = only_step(gateway, uid).segments
    assert [(s.incarnation, s.version, s.first_token) for s in found] == segments


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "hello"}),
        ("responses", {"input": "hello"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_say_which_weights_sampled_them(
    gateway: RunningGateway,
    stub: StubEngine,
    uid: str,
    prompt_uid: str,
    route: str,
    body: Any,
    stream: bool,
) -> None:
    """A retry gets it too, from the log."""
    path, body = f"/{uid}/{prompt_uid}/v1/{route}", body | {"stream": stream}
    stub.script([said("ab", weight_versions=CHANGED_WEIGHTS)])
    for headers in ({}, RETRY):
        if stream:
            events = Streaming(gateway, path, body, **headers).events()
            last = [json.loads(event) for event in events if event != "[DONE]"][-1]
            answer = last.get("response", last)
        else:
            answer = gateway.post(path, body, headers).body
        assert answer["system_fingerprint"] == "1.3,1.4"


def test_an_error_in_mid_stream_is_an_event_and_no_step(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    stub.script([said("abcdef", fault="error", chunk_delay=0.02)])
    path = f"/{uid}/{prompt_uid}/v1/chat/completions"
    events = list(Streaming(gateway, path, {"messages": HELLO, "stream": True}).events())
    assert "error" in json.loads(events[-1])
    assert not any('"finish_reason":"' in event for event in events)
    assert "[DONE]" not in events
    assert steps(gateway, uid) == []
