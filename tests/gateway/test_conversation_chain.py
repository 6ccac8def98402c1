"""Which earlier answer a call continues: hashes of messages, and the ids behind them."""

import json
from typing import Any

import pytest

from gateway.dialects.chat_messages import template_messages
from gateway.dialects.request import Request, ToolCall
from gateway.state.conversation import THREADS, Conversation, HashChain
from schemas.packing import pack_ids, unpack_ids
from tests.gateway.dialects import an_answer

HELLO = {"role": "user", "content": "hello"}
NEXT = {"role": "user", "content": "go on"}
TOOLS: Any = [{"type": "function", "function": {"name": "look"}}]


def request(*messages: Any, **fields: Any) -> Request:
    return Request(messages=template_messages(list(messages)), **fields)


def after(answer: Any, *messages: Any, **fields: Any) -> bytes:
    return HashChain(request(*messages, **fields)).after(answer.message())


def spoken(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def called(arguments: Any, name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


def continues(answer: Any, sent_back: dict[str, Any], **fields: Any) -> bool:
    """Whether the client's version of the answer is recognised."""
    digest = after(answer, HELLO, **fields)
    ((_, found),) = HashChain(request(HELLO, sent_back, NEXT, **fields)).answers
    return found == digest


@pytest.mark.parametrize(
    "sent_back",
    [
        spoken("well"),
        spoken("  well\n"),
        spoken("<think>\nother\n</think>\n\nwell"),
        spoken("well", reasoning_content="anything"),
        spoken("well", refusal=None, audio=None, name=None),
        spoken([{"type": "text", "text": "well"}]),  # type: ignore[arg-type]
    ],
)
def test_an_answer_is_known_by_what_it_says(sent_back: dict[str, Any]) -> None:
    assert continues(an_answer("<think>\nhm\n</think>\n\nwell"), sent_back)


@pytest.mark.parametrize(
    "sent_back",
    [spoken("we ll"), spoken("Well"), spoken("well", tool_calls=[called({})]), spoken("")],
)
def test_an_answer_that_says_something_else_is_another(sent_back: dict[str, Any]) -> None:
    assert not continues(an_answer("well"), sent_back)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1, "b": [2.0, {"c": "é"}]}',
        '{"b":[2,{"c":"\\u00e9"}],"a":1.0}',
        {"a": 1, "b": [2, {"c": "é"}]},
    ],
)
def test_a_tool_call_is_known_by_its_values(arguments: Any) -> None:
    whole = json.dumps({"a": 1, "b": [2, {"c": "é"}]})
    answer = an_answer("", tool_calls=[ToolCall(id="y", name="look", arguments=whole)])
    assert continues(answer, spoken("", tool_calls=[called(arguments)]))
    assert continues(answer, {"role": "assistant", "tool_calls": [called(arguments)]})


@pytest.mark.parametrize(
    "other", [called('{"a": 2}'), called('{"a": 1}', "see"), called("{}"), called('{"a": "1"}')]
)
def test_another_tool_call_is_another_answer(other: Any) -> None:
    answer = an_answer("", tool_calls=[ToolCall(id="y", name="look", arguments='{"a": 1}')])
    assert not continues(answer, spoken("", tool_calls=[other]))


@pytest.mark.parametrize("arguments", ["", "no JSON", '"text"', "[1]", "null"])
def test_arguments_that_are_no_object_come_back_as_they_were(arguments: str) -> None:
    answer = an_answer("", tool_calls=[ToolCall(id="y", name="look", arguments=arguments)])
    assert continues(answer, spoken("", tool_calls=[called(arguments)]))


@pytest.mark.parametrize(
    "other",
    [
        request({"role": "user", "content": "Hello"}),
        request({"role": "system", "content": "x"}, HELLO),
        request(HELLO, tools=TOOLS),
        request(HELLO, template={"enable_thinking": False}),
        request({"role": "user", "content": "hello "}),
    ],
)
def test_everything_before_the_answer_counts(other: Request) -> None:
    answer = an_answer("well").message()
    assert HashChain(other).after(answer) != HashChain(request(HELLO)).after(answer)


# Conversations


class Talk:
    """A trajectory's Steps, with ids that need no tokenizer."""

    def __init__(self) -> None:
        self.conversation = Conversation()
        self._count = 0

    def add(self, prompt: list[int], reply: list[int], text: str, *messages: Any) -> None:
        self._count += 1
        self.conversation.add(
            f"s{self._count}",
            pack_ids(prompt),
            pack_ids(reply),
            after(an_answer(text), *messages),
        )

    def find(self, *messages: Any) -> tuple[int, list[int]] | None:
        found = self.conversation.find(HashChain(request(*messages)))
        return found and (found.messages, list(unpack_ids(found.ids)))


def test_a_call_goes_on_behind_the_last_answer_that_is_known() -> None:
    talk = Talk()
    talk.add([1, 2], [3], "one", HELLO)
    talk.add([1, 2, 3, 4], [5], "two", HELLO, spoken("one"), NEXT)
    history = [HELLO, spoken("one"), NEXT, spoken("two")]
    assert talk.find(*history, NEXT) == (4, [1, 2, 3, 4, 5])
    assert talk.find(*history[:2], {"role": "user", "content": "or"}) == (2, [1, 2, 3])
    assert talk.find(HELLO) is None
    assert talk.find(HELLO, spoken("other"), NEXT) is None


def test_an_unknown_answer_behind_a_known_one_is_part_of_what_follows() -> None:
    talk = Talk()
    talk.add([1, 2], [3], "one", HELLO)
    made_up = [HELLO, spoken("one"), NEXT, spoken("made up"), NEXT]
    assert talk.find(*made_up) == (2, [1, 2, 3])


def test_a_linear_conversation_is_one_thread() -> None:
    talk, prompt = Talk(), [1, 2]
    for n in range(50):
        talk.add(prompt, [100 + n], str(n), HELLO)
        prompt = [*prompt, 100 + n, 3]
    assert list(talk.conversation.contexts()) == ["s50"]


def test_threads_that_were_used_least_are_forgotten() -> None:
    talk = Talk()
    for n in range(THREADS + 5):
        talk.add([1000 + n, 2], [n], str(n), HELLO)
    contexts = talk.conversation.contexts()
    assert len(contexts) == THREADS
    assert "s1" not in contexts and f"s{THREADS + 5}" in contexts
    assert talk.find(HELLO, spoken("0"), NEXT) is None
    assert talk.find(HELLO, spoken(str(THREADS)), NEXT) == (2, [1000 + THREADS, 2, THREADS])


def test_a_prompt_is_found_again_by_its_answer() -> None:
    talk = Talk()
    talk.add([1, 2], [3], "one", HELLO)
    talk.add([1, 2, 3, 4], [5], "two", HELLO, spoken("one"), NEXT)
    digest = after(an_answer("one"), HELLO)
    assert talk.conversation.prompt_of(digest, pack_ids([3])) == pack_ids([1, 2])
    assert talk.conversation.prompt_of(b"unknown", b"") == b""
    assert talk.conversation.prompt_of(None, b"") == b""
