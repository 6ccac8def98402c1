"""The gateway in front of the real vLLM: the ids that it sampled are the ids in the log.

The model is tiny and random. A test that needs certain words has the engine hold it to them.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from pool.connection import Connection
from pool.prompts import full_prompts
from pool.topics import POLICY
from schemas import PolicyVersion, Segment, Step, StepNote
from schemas.packing import unpack_ids, unpack_logprobs
from tests.gateway.running import RunningGateway, running_gateway
from tests.pool.log import write
from tests.tiny_model import EOS, IDS, STRIPPING, build_model_apart, said, saying
from tests.vllm_engine import NAME, TOOLS, Engine, running_vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broker,
    pytest.mark.timeout(420),  # the first test waits for vLLM
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: steplog[cpu]"),
]

HELLO: Any = [{"role": "user", "content": "hello"}]
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
STRICT: Any = {"type": "function", "function": FUNCTION | {"strict": True}}
CALLING = '<think>a b</think>hi<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>'
NO_WHITE_SPACE = {"logit_bias": {str(ord(space)): -100 for space in " \t\n\r"}}
ODD = 'naïve "q" \\ \t\n\n한국 👩\u200d🚀 e\u0301 \u2028 </p> {{x}} \x7f'
LONG = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_apart(tmp_path_factory.mktemp("model"), STRIPPING)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with running_vllm(model, *TOOLS) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(log: Connection, engine: Engine, model: Path) -> Iterator[RunningGateway]:
    with running_gateway(log, [engine.url], model) as running:
        yield running


@pytest.fixture
def client(gateway: RunningGateway, uid: str, prompt_uid: str) -> openai.OpenAI:
    return gateway.openai(uid, prompt_uid)


def ask(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="default", messages=messages, **options)


def streamed(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> Any:
    """The answer, put together again by the client."""
    with client.chat.completions.stream(model="default", messages=messages, **options) as events:
        for _ in events:
            pass
        return events.current_completion_snapshot


def say(text: str, spelled: bool = False, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 400, "extra_body": saying(text, spelled) | more}


def response(step: Step) -> list[int]:
    return list(unpack_ids(step.response_ids))


def logprobs(step: Step) -> list[float]:
    return list(unpack_logprobs(step.response_logprobs))


def prompts(steps: list[Step]) -> list[list[int]]:
    return [list(unpack_ids(prompt)) for prompt in full_prompts(steps).values()]


def rendered(engine: Engine, messages: Any, tools: Any = None) -> list[int]:
    """What vLLM itself would give the model."""
    body = {"model": NAME, "messages": messages} | ({"tools": tools} if tools else {})
    ids: list[int] = engine.post("/v1/chat/completions/render", body)["token_ids"]
    return ids


def until(true: Callable[[], bool], limit: float) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() < began + limit, "it did not happen"
        time.sleep(0.1)
    return time.monotonic() - began


# Ids and logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_has_the_ids_and_logprobs_that_vllm_samples(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str, stream: bool
) -> None:
    call = streamed if stream else ask
    call(client, seed=7, temperature=0.7, max_tokens=48)
    (step,) = gateway.steps(uid)
    (prompt,) = prompts([step])
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
    (step,) = gateway.steps(uid)
    *text, last = response(step)
    assert last == EOS
    assert answer.choices[0].message.content == "a" * len(text)
    assert answer.choices[0].finish_reason == step.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(text) + 1 == len(logprobs(step))


def test_an_answer_that_ends_at_once_is_empty(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    only_end = {"extra_body": {"allowed_token_ids": [EOS]}}
    for call, tools in ((ask, {}), (streamed, {}), (ask, {"tools": [TOOL]})):
        answer = call(client, **only_end, **tools)
        assert answer.choices[0].message.content == ""
        assert answer.choices[0].finish_reason == "stop"
    answer = streamed(client, **only_end, tools=[TOOL])
    assert not answer.choices[0].message.content
    assert [response(step) for step in gateway.steps(uid)] == [[EOS]] * 4


def test_whole_and_streamed_are_the_same_answer(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    """Noise has bytes that are no text, which a stream must not cut otherwise than a whole."""
    for seed in range(5):
        whole = ask(client, seed=seed, max_tokens=60)
        parts = list(ask(client, seed=seed, max_tokens=60, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content
        one, two = gateway.steps(uid)[-2:]
        assert response(one) == response(two)
        assert logprobs(one) == pytest.approx(logprobs(two), abs=1e-4)
        assert len(parts) > 20  # it came bit by bit


def test_what_was_not_asked_for_is_not_in_the_answer(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=5).to_dict()
    assert set(whole) == {"id", "object", "created", "model", "choices", "usage"}
    assert whole["choices"][0].get("logprobs") is None
    assert set(whole["choices"][0]) <= {"index", "message", "finish_reason", "logprobs"}
    for part in ask(client, max_tokens=5, stream=True):
        told = part.to_dict()
        assert set(told) == {"id", "object", "created", "model", "choices"}
        assert set(told["choices"][0]) == {"index", "delta", "finish_reason"}


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["text", "tools"])
def test_what_was_asked_for_is_what_the_log_has(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, tools: Any
) -> None:
    wanted: Any = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12, "seed": 3} | tools
    wanted["extra_body"] = {"return_token_ids": True}
    answer = ask(client, **wanted)
    (choice,) = answer.choices
    (step,) = gateway.steps(uid)
    assert [answer.prompt_token_ids] == prompts([step])
    assert choice.token_ids == response(step)
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(logprobs(step))
    assert all(len(entry.top_logprobs) >= 2 for entry in choice.logprobs.content)

    parts = [part.choices[0] for part in ask(client, **wanted, stream=True)]
    ids = [token_id for part in parts for token_id in getattr(part, "token_ids", None) or ()]
    assert ids == choice.token_ids
    told = [entry.logprob for part in parts if part.logprobs for entry in part.logprobs.content]
    assert told == pytest.approx(logprobs(step), abs=1e-4)


@pytest.mark.parametrize("stop", [".", "...", ["x", ".b"]])
@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["text", "tools"])
def test_a_stop_string_is_in_the_log_and_not_in_the_text(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, stop: Any, tools: Any
) -> None:
    options: Any = {"stop": stop, "extra_body": {"structured_outputs": {"choice": ["a...b..."]}}}
    for call in (ask, streamed):
        answer = call(client, **options, **tools)
        sampled = bytes(response(gateway.steps(uid)[-1])).decode()
        stops = [stop] if isinstance(stop, str) else stop
        assert sampled.endswith(tuple(stops))
        assert (
            answer.choices[0].message.content
            == sampled[: min(filter(lambda at: at >= 0, map(sampled.find, stops)))]
        )
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["text", "tools"])
def test_odd_characters_survive(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str, tools: Any
) -> None:
    messages = [{"role": "system", "content": ODD}, {"role": "user", "content": ODD}]
    for call in (ask, streamed):
        answer = call(client, messages, **say(ODD), **tools)
        assert answer.choices[0].message.content == ODD
        step = gateway.steps(uid)[-1]
        assert response(step) == [*ODD.encode(), EOS]
    for prompt in prompts(gateway.steps(uid)):
        assert prompt == rendered(engine, messages, **tools)


# Conversations


def test_a_first_prompt_is_the_one_that_vllm_would_render(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str
) -> None:
    system = {"role": "system", "content": "be kind"}
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, *HELLO]
    for messages in (HELLO, [system, *HELLO], [system, *talk]):
        for tools in ({}, {"tools": [TOOL]}):
            ask(client, messages, max_tokens=1, **tools)  # type: ignore[arg-type]
            assert prompts(gateway.steps(uid))[-1] == rendered(engine, messages, **tools)


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "letters"])
def test_each_prompt_extends_the_one_before_whatever_the_template_strips(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str, spelled: bool
) -> None:
    """Spelled in letters, not even the text would give the sampled ids back."""
    tool_result = {"role": "tool", "tool_call_id": "c", "content": "7"}
    question = {"role": "user", "content": "and now?"}
    turns: Any = [
        (HELLO, CALLING, ask),
        ([tool_result], "<think>hm</think>seven", streamed),
        ([question], CALLING.replace('"x":1', '"x" : 2'), streamed),
        ([tool_result, tool_result], "  spaces  ", ask),
        ([question], "bye", ask),
    ]
    messages: list[Any] = []
    renders = []
    for new, text, call in turns:
        messages += new
        renders.append(rendered(engine, messages, [TOOL]))
        answer = call(client, messages, tools=[TOOL], **say(text, spelled))
        messages.append(answer.choices[0].message.to_dict())
    steps = gateway.steps(uid)
    sequences = [p + response(s) for p, s in zip(prompts(steps), steps, strict=True)]
    if not spelled:
        assert [response(step) for step in steps] == [[*said(text), EOS] for _, text, _ in turns]
    for before, prompt, render in zip(sequences, prompts(steps)[1:], renders[1:], strict=False):
        assert prompt[: len(before)] == before
        assert render[: len(before)] != before
    assert prompts(steps)[0] == renders[0]
    assert [step.parent for step in steps] == [None, *(step.step_id for step in steps[:-1])]


def test_an_end_of_turn_inside_a_call_does_not_end_it(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    """The model may spell the marker as an argument; what follows the answer is still the same."""
    call = '<tool_call>\n{"name":"f","arguments":{"x":"<|im_end|>\\n"}}\n</tool_call>'
    bias = saying(call)["logit_bias"] | {str(EOS): -100}
    first = ask(client, tools=[TOOL], **say(call, logit_bias=bias))
    result = {"role": "tool", "tool_call_id": "c", "content": "7"}
    messages = [*HELLO, first.choices[0].message.to_dict(), result]
    ask(client, messages, tools=[TOOL], max_tokens=1)
    one, two = gateway.steps(uid)
    before, prompt = prompts([one, two])
    before += response(one)
    assert response(one) == [*said(call), EOS]
    assert prompt[: len(before)] == before
    rest = b"\n\x00user\n<tool_response>\n7\n</tool_response>\x01\n\x00assistant\n"
    assert prompt[len(before) :] == [256 + byte if byte < 2 else byte for byte in rest]


def test_an_answer_that_was_cut_is_continued(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    cut = ask(client, max_tokens=9, extra_body=saying("one two three"))
    assert cut.choices[0].message.content == "one two t"
    ask(client, [*HELLO, cut.choices[0].message.to_dict(), *HELLO], max_tokens=1)
    one, two = gateway.steps(uid)
    before, prompt = prompts([one, two])
    assert prompt[: len(before) + 10] == [*before, *b"one two t", EOS]


@pytest.mark.parametrize("call", [ask, streamed])
@pytest.mark.parametrize("at", [30, len(said(CALLING))], ids=["inside", "behind"])
def test_a_call_that_was_cut_says_so_and_is_continued(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, call: Any, at: int
) -> None:
    cut = call(client, tools=[TOOL], max_tokens=at, extra_body=saying(CALLING))
    assert cut.choices[0].finish_reason == "length"
    ask(client, [*HELLO, cut.choices[0].message.to_dict(), *HELLO], tools=[TOOL], max_tokens=1)
    one, two = gateway.steps(uid)
    before, prompt = prompts([one, two])
    assert prompt[: len(before) + at + 1] == [*before, *said(CALLING)[:at], EOS]
    assert prompt[len(before) + at + 1 :] == [
        *b"\n",
        256,
        *b"user\nhello",
        EOS,
        *b"\n",
        256,
        *b"assistant\n",
    ]


def test_an_answer_with_another_end_is_continued(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    other = IDS["<|endoftext|>"]
    ended = ask(client, extra_body={"allowed_token_ids": [other], "stop_token_ids": [other]})
    ask(client, [*HELLO, ended.choices[0].message.to_dict(), *HELLO], max_tokens=1)
    one, two = gateway.steps(uid)
    before, prompt = prompts([one, two])
    assert prompt[: len(before) + 2] == [*before, other, EOS]


# Tools


@pytest.mark.parametrize("call", [ask, streamed])
def test_tool_calls_are_parsed(client: openai.OpenAI, call: Any) -> None:
    twice = 'ok<tool_call>\n{"name":"f","arguments":{"x":"é👩\u200d🚀"}}\n</tool_call>' + (
        '\n<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>'
    )
    (choice,) = call(client, tools=[TOOL], **say(twice)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "ok"
    first, second = choice.message.tool_calls
    assert json.loads(first.function.arguments) == {"x": "é👩\u200d🚀"}
    assert json.loads(second.function.arguments) == {}
    assert first.function.name == second.function.name == "f"
    assert first.id and second.id and first.id != second.id


@pytest.mark.parametrize("call", [ask, streamed])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_can_be_demanded(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, call: Any, choice: Any
) -> None:
    limits: Any = {"max_tokens": 300, "seed": 5, "extra_body": NO_WHITE_SPACE}
    answer = call(client, tools=[STRICT], tool_choice=choice, parallel_tool_calls=False, **limits)
    calls = answer.choices[0].message.tool_calls
    assert {one.function.name for one in calls} == {"f"}
    assert all(json.loads(one.function.arguments)["x"] in (1, 2) for one in calls)
    assert answer.choices[0].finish_reason == "tool_calls"
    (step,) = gateway.steps(uid)
    assert step.not_trainable == "the distribution was changed by tool_choice"


def test_without_tools_the_raw_text_stays(client: openai.OpenAI) -> None:
    for call in (ask, streamed):
        (choice,) = call(client, **say(CALLING)).choices
        assert choice.message.content == CALLING
        assert not choice.message.tool_calls
        assert choice.finish_reason == "stop"


def test_anthropics_client_streams_a_tool_call(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    client = gateway.anthropic(uid, prompt_uid)
    tool: Any = {"name": "f", "description": "counts", "input_schema": FUNCTION["parameters"]}
    messages: Any = list(HELLO)
    for text in (CALLING, "bye"):
        with client.messages.stream(
            model="default",
            max_tokens=300,
            messages=messages,
            tools=[tool],
            extra_body=saying(text),
        ) as events:
            answer = events.get_final_message()
        messages += [{"role": "assistant", "content": answer.content}]
        if answer.stop_reason == "tool_use":
            told, called = answer.content
            assert called.type == "tool_use"
            assert (called.name, called.input) == ("f", {"x": 1})
            result = {"type": "tool_result", "tool_use_id": called.id, "content": "7"}
            messages += [{"role": "user", "content": [result]}]
    assert answer.stop_reason == "end_turn"
    _assert_extended(gateway.steps(uid), 2)


def test_the_responses_client_calls_a_tool(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    client = gateway.openai(uid, prompt_uid)
    tool: Any = {"type": "function", "strict": False} | FUNCTION
    items: Any = [{"role": "user", "content": "hello"}]
    with client.responses.stream(
        model="default", input=items, tools=[tool], extra_body=saying(CALLING)
    ) as events:
        answer = events.get_final_response()
    called = answer.output[-1]
    assert called.type == "function_call"
    assert (called.name, json.loads(called.arguments)) == ("f", {"x": 1})
    items += [item.to_dict() for item in answer.output]
    items += [{"type": "function_call_output", "call_id": called.call_id, "output": "7"}]
    last = client.responses.create(
        model="default", input=items, tools=[tool], extra_body=saying("bye")
    )
    assert last.output_text == "bye"
    _assert_extended(gateway.steps(uid), 2)


def _assert_extended(steps: list[Step], count: int) -> None:
    assert len(steps) == count
    for one, two, before, prompt in zip(
        steps, steps[1:], prompts(steps), prompts(steps)[1:], strict=False
    ):
        sequence = before + response(one)
        assert prompt[: len(sequence)] == sequence
        assert two.parent == one.step_id


def test_a_schema_is_kept_to_and_the_step_is_marked(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    schema = {"name": "s", "schema": FUNCTION["parameters"]}
    for call in (ask, streamed):
        answer = call(
            client,
            response_format={"type": "json_schema", "json_schema": schema},
            extra_body=NO_WHITE_SPACE,
            max_tokens=100,
        )
        assert json.loads(answer.choices[0].message.content)["x"] in (1, 2)
    for step in gateway.steps(uid):
        assert "structured_outputs" in (step.not_trainable or "")


@pytest.mark.parametrize("length", [1024, 3000])
@pytest.mark.parametrize(
    "options", [{}, {"max_tokens": 1, "stream": True}, {"tools": [TOOL], "stream": True}]
)
def test_a_prompt_that_is_too_long_is_the_clients_mistake(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, length: int, options: Any
) -> None:
    frame = len("..user\n..\n..assistant\n") - 3
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, [{"role": "user", "content": "a" * (length - frame)}], **options)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.type == "invalid_request_error"
    assert gateway.log_of(uid) == []
    assert gateway.get("/ready").status == 200


# Weights


def test_segments_say_which_weights_sampled_which_tokens(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str
) -> None:
    engine.label("1.3")
    ids: list[int] = []
    options: Any = {"max_tokens": 400, "stream": True}
    options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}

    def listen() -> None:
        for part in ask(client, **options):
            ids.extend(getattr(part.choices[0], "token_ids", None) or ())

    listening = threading.Thread(target=listen)
    listening.start()
    until(lambda: len(ids) > 20, 30)
    with engine.paused():
        time.sleep(1)
        before = len(ids)
        engine.label("1.4")
        time.sleep(1)
        assert len(ids) == before
    listening.join()
    (step,) = gateway.steps(uid)
    assert response(step) == ids
    assert 20 < before < 400
    assert step.segments == [
        Segment(incarnation=1, version=3, first_token=0),
        Segment(incarnation=1, version=4, first_token=before),
    ]


def test_an_engine_with_old_weights_gets_no_calls(
    log: Connection, engine: Engine, model: Path, uid: str, prompt_uid: str
) -> None:
    engine.label("1.3")
    run = f"run-{uid}"
    live = PolicyVersion(run=run, incarnation=1, version=4, phase="live")
    write(log, POLICY, [live])
    options = ("--run", run, "--engine-wait-s", "1")
    with running_gateway(log, [engine.url], model, *options, wait=False) as gateway:
        client = gateway.openai(uid, prompt_uid)
        until(lambda: _answers(gateway), 30)
        until(lambda: "no engine" in str(gateway.get("/ready").body), 30)
        generated = engine.metric("vllm:request_success_total")
        with pytest.raises(openai.InternalServerError) as refusal:
            ask(client, max_tokens=3)
        assert refusal.value.status_code == 503
        assert engine.metric("vllm:request_success_total") == generated
        engine.label("1.4")
        until(lambda: gateway.get("/ready").status == 200, 10)
        ask(client, max_tokens=3)
        (step,) = gateway.steps(uid)
        assert step.segments == [Segment(incarnation=1, version=4, first_token=0)]


def _answers(gateway: RunningGateway) -> bool:
    try:
        return gateway.get("/health").status == 200
    except OSError:
        return False


# Clients and engines that go away


def test_a_client_that_leaves_has_a_step_with_a_note(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str
) -> None:
    stream = ask(client, stream=True, max_tokens=300, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until(lambda: len(gateway.log_of(uid)) == 2, 30)
    step, note = (found.record for found in gateway.log_of(uid))
    assert isinstance(step, Step)
    assert isinstance(note, StepNote)
    assert len(response(step)) == 300
    assert (note.step_id, note.delivered) == (step.step_id, False)
    assert engine.requests() == 0


def test_a_generation_that_nobody_waits_for_is_given_up(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str
) -> None:
    stream = ask(client, stream=True, **LONG)
    next(iter(stream))
    with engine.paused():
        stream.close()
        time.sleep(1)
        assert engine.requests() == 1  # for now: its client may come back
        assert until(lambda: engine.requests() == 0, 30) > 5
    assert gateway.log_of(uid) == []
    assert ask(client, max_tokens=1).usage.completion_tokens == 1


def test_an_engine_that_dies_ends_the_stream_with_an_error(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str
) -> None:
    """The last one: nothing comes after it."""
    stream = ask(client, stream=True, **LONG)
    next(iter(stream))
    os.kill(engine.pid, 9)
    with pytest.raises(openai.APIError) as failure:
        list(stream)
    assert "engine" in str(failure.value)
    assert gateway.log_of(uid) == []
    until(lambda: gateway.get("/ready").status == 503, 10)
