"""Several turns: the next prompt goes on exactly where the engine left off, whatever the template and
the client make of the answer in between."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from pool.connection import Connection
from tests.gateway.client import (
    HELLO,
    TOOLS,
    asked,
    call,
    chat,
    ids_of,
    prompts,
    response,
    said,
    steps,
)
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.tiny_model import EOS, STRIPPING, build_tokenizer

pytestmark = pytest.mark.broker

THOUGHT = "<think>\nlet me see\n</think>\n\nwell"
NEXT = {"role": "user", "content": "go on"}
BETWEEN = ids_of("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture(scope="module")
def stripping(
    log: Connection, stub: StubEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """Its template drops earlier reasoning and spells tool calls anew."""
    tokenizer = build_tokenizer(tmp_path_factory.mktemp("stripping"), STRIPPING)
    with running_gateway(log, [stub.url], tokenizer) as running:
        yield running


@pytest.fixture(params=["plain", "stripping"])
def either(request: pytest.FixtureRequest) -> RunningGateway:
    """Each template."""
    name = {"plain": "gateway", "stripping": "stripping"}[request.param]
    found: RunningGateway = request.getfixturevalue(name)
    return found


class Talk:
    """An agent that sends everything that was said, as its client has it."""

    def __init__(self, gateway: RunningGateway, stub: StubEngine, **body: Any) -> None:
        self.gateway = gateway
        self.stub = stub
        self.uid, self.prompt_uid = f"t-{uuid.uuid4().hex[:12]}", f"p-{uuid.uuid4().hex[:12]}"
        self.body = body
        self.messages: list[dict[str, Any]] = list(HELLO)

    def turn(self, answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Asks, and takes the answer into the history."""
        self.stub.script([answer])
        reply = chat(self.gateway, self.uid, self.prompt_uid, self.messages, **self.body)
        assert reply.status == 200, reply
        message: dict[str, Any] = reply.body["choices"][0]["message"]
        self.messages = [*self.messages, {**message, **changes}]
        return message

    def says(self, **message: Any) -> None:
        self.messages = [*self.messages, message]

    def check_continued(self, between: list[int]) -> None:
        """The last prompt is the one before it, what was sampled, and `between`."""
        first, second = asked(self.stub, 2)
        sampled = response(steps(self.gateway, self.uid)[-2])
        assert second == first + sampled + between
        assert prompts(self.gateway, self.uid)[-2:] == [first, second]


def test_a_second_turn_extends_the_first_exactly(either: RunningGateway, stub: StubEngine) -> None:
    talk = Talk(either, stub)
    talk.turn(said("well"))
    talk.says(**NEXT)
    talk.turn(said("fine"))
    talk.check_continued(BETWEEN)


def test_reasoning_that_the_template_would_drop_stays(
    either: RunningGateway, stub: StubEngine
) -> None:
    talk = Talk(either, stub)
    assert talk.turn(said(THOUGHT))["content"] == THOUGHT
    talk.says(**NEXT)
    talk.turn(said("fine"))
    talk.check_continued(BETWEEN)


@pytest.mark.parametrize("sent_back", ["well", " well\n", THOUGHT.strip()])
def test_a_client_may_drop_reasoning_and_white_space(
    either: RunningGateway, stub: StubEngine, sent_back: str
) -> None:
    talk = Talk(either, stub)
    talk.turn(said(THOUGHT + " \n"), content=sent_back)
    talk.says(**NEXT)
    talk.turn(said("fine"))
    talk.check_continued(BETWEEN)


def test_an_answer_that_was_cut_is_continued_with_its_end_of_turn(
    either: RunningGateway, stub: StubEngine
) -> None:
    talk = Talk(either, stub)
    talk.turn(said("wel", end=None, finish_reason="length"))
    talk.says(**NEXT)
    talk.turn(said("fine"))
    talk.check_continued([EOS, *BETWEEN])


def test_reasoning_that_was_cut_is_continued(either: RunningGateway, stub: StubEngine) -> None:
    talk = Talk(either, stub)
    talk.turn(said("<think>\nlet me", end=None, finish_reason="length"))
    talk.says(**NEXT)
    talk.turn(said("fine"))
    talk.check_continued([EOS, *BETWEEN])


def test_an_answer_that_a_stop_string_ended_keeps_it_in_the_next_prompt(
    either: RunningGateway, stub: StubEngine
) -> None:
    talk = Talk(either, stub, stop=["STOP"])
    assert talk.turn(said("well STOP", end=None, stop_reason="STOP"))["content"] == "well "
    talk.says(**NEXT)
    talk.turn(said("fine"))
    talk.check_continued([EOS, *BETWEEN])


@pytest.mark.parametrize("space", [" ", "", "  "])
@pytest.mark.parametrize("before", ["", "I look.\n", THOUGHT])
def test_tool_calls_stay_as_they_were_sampled(
    either: RunningGateway, stub: StubEngine, space: str, before: str
) -> None:
    """Other spacing than the template's, other order of keys than a client's."""
    arguments = f'{{"b":{space}1.0,"at":{space}"home"}}'
    talk = Talk(either, stub, tools=TOOLS)
    message = talk.turn(said(before + call("look", arguments, space)))
    (called,) = message["tool_calls"]
    function = {"name": "look", "arguments": json.dumps({"at": "home", "b": 1})}
    talk.messages[-1] = {
        "role": "assistant",
        "content": message["content"],
        "tool_calls": [{"id": called["id"], "type": "function", "function": function}],
    }
    talk.says(role="tool", content="a house", tool_call_id=called["id"])
    talk.turn(said("fine"))
    talk.check_continued(
        ids_of(
            "\n<|im_start|>user\n<tool_response>\na house\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
    )


def test_a_long_conversation_is_stored_as_deltas(gateway: RunningGateway, stub: StubEngine) -> None:
    talk = Talk(gateway, stub)
    talk.turn(said("well, well, well, well"))
    for _ in range(10):
        talk.says(**NEXT)
        talk.turn(said("and so on"))
    found = steps(gateway, talk.uid)
    assert [step.step_index for step in found] == list(range(11))
    assert [step.parent for step in found] == [None, *(step.step_id for step in found[:-1])]
    contexts = [len(p) + len(response(s)) for p, s in zip(asked(stub, 11), found, strict=True)]
    assert [step.prefix_length for step in found] == [0, *contexts[:-1]]
    assert {len(step.prompt_ids) // 4 for step in found[1:]} == {len(BETWEEN)}
    assert prompts(gateway, talk.uid) == asked(stub, 11)


def test_history_that_was_rewritten_begins_a_new_prefix_and_is_counted(
    gateway: RunningGateway, stub: StubEngine
) -> None:
    talk = Talk(gateway, stub)
    talk.turn(said("well"))
    before = gateway.metric("gateway_prompts_total", kind="rewritten")
    talk.messages[-1]["content"] = "something that was never said"
    talk.says(**NEXT)
    talk.turn(said("fine"))
    assert gateway.metric("gateway_prompts_total", kind="rewritten") == before + 1
    assert asked(stub)[0] == ids_of(
        "<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nsomething that was never said<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompts(gateway, talk.uid) == asked(stub, 2)


def test_continued_and_first_prompts_are_counted_as_such(
    gateway: RunningGateway, stub: StubEngine
) -> None:
    before = {k: gateway.metric("gateway_prompts_total", kind=k) for k in ("first", "continued")}
    talk = Talk(gateway, stub)
    talk.turn(said("well"))
    talk.says(**NEXT)
    talk.turn(said("fine"))
    after = {k: gateway.metric("gateway_prompts_total", kind=k) for k in ("first", "continued")}
    assert {kind: after[kind] - before[kind] for kind in after} == {"first": 1, "continued": 1}


def test_a_branch_from_an_earlier_turn_continues_that_one_exactly(
    either: RunningGateway, stub: StubEngine
) -> None:
    talk = Talk(either, stub)
    talk.turn(said(THOUGHT))
    fork = talk.messages
    talk.says(**NEXT)
    talk.turn(said("fine"))
    talk.messages = fork
    talk.says(role="user", content="or else?")
    talk.turn(said("hm"))
    first, _, branch = asked(stub, 3)
    assert branch == first + response(steps(either, talk.uid)[0]) + ids_of(
        "\n<|im_start|>user\nor else?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompts(either, talk.uid)[-1] == branch


def test_other_tools_are_another_prompt(gateway: RunningGateway, stub: StubEngine) -> None:
    """They stand at its beginning, so the ids cannot be continued."""
    talk = Talk(gateway, stub)
    talk.turn(said("well"))
    talk.says(**NEXT)
    talk.body["tools"] = TOOLS
    talk.turn(said("fine"))
    assert b"Look it up." in bytes(i for i in asked(stub)[0] if i < 256)


def test_a_conversation_goes_on_across_apis(gateway: RunningGateway, stub: StubEngine) -> None:
    """Claude's API on a trajectory that OpenAI's began."""
    talk = Talk(gateway, stub)
    talk.turn(said("well"))
    stub.script([said("fine")])
    history: Any = [*talk.messages, NEXT]
    gateway.anthropic(talk.uid, talk.prompt_uid).messages.create(
        model="", max_tokens=50, messages=history
    )
    talk.check_continued(BETWEEN)


def test_anthropics_tool_use_is_continued_exactly(
    stripping: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    messages = stripping.anthropic(uid, prompt_uid).messages
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    stub.script([said(THOUGHT + call("look", '{"at":"home"}', "")), said("fine")])
    history: Any = [{"role": "user", "content": "hello"}]
    answer = messages.create(model="", max_tokens=50, tools=tools, messages=history)
    used = answer.content[-1]
    assert used.type == "tool_use"
    history = [
        *history,
        {"role": "assistant", "content": answer.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "a house"}],
        },
    ]
    messages.create(model="", max_tokens=50, tools=tools, messages=history)
    first, second = asked(stub, 2)
    assert second[: len(first)] == first
    sampled = response(steps(stripping, uid)[0])
    assert second[len(first) : len(first) + len(sampled)] == sampled


def test_a_responses_conversation_is_continued_exactly(
    gateway: RunningGateway, stub: StubEngine, uid: str, prompt_uid: str
) -> None:
    responses = gateway.openai(uid, prompt_uid).responses
    stub.script([said(THOUGHT), said("fine")])
    history: Any = [{"role": "user", "content": "hello"}]
    answer = responses.create(model="", input=history)
    history = [*history, *answer.output, {"role": "user", "content": "go on"}]
    responses.create(model="", input=history)
    first, second = asked(stub, 2)
    assert second == first + response(steps(gateway, uid)[0]) + BETWEEN
