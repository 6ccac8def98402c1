"""The next prompt begins with the ids of the last one and its answer, whatever the template does."""

from typing import Any

import openai
import pytest

from tests.gateway.client import HELLO, ids_of, prompts, response, steps
from tests.gateway.real_engine.calls import (
    CALLING,
    REAL,
    TOOL,
    ask,
    assert_extended,
    rendered,
    say,
    sequences,
    streamed,
)
from tests.gateway.running import RunningGateway
from tests.tiny_model import EOS, IDS, saying
from tests.vllm_engine import Engine

pytestmark = REAL

SYSTEM = {"role": "system", "content": "be kind"}
QUESTION = {"role": "user", "content": "and now?"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "7"}
TALK = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, QUESTION]
THEN_HELLO = ids_of("\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def added(gateway: RunningGateway, uid: str) -> list[int]:
    """What the second prompt has behind the first answer."""
    assert_extended(gateway, uid, 2)
    return prompts(gateway, uid)[1][len(sequences(gateway, uid)[0]) :]


@pytest.mark.parametrize("messages", [HELLO, [SYSTEM, *HELLO], TALK, [SYSTEM, *TALK]])
@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["text", "tools"])
def test_a_first_prompt_is_the_one_that_vllm_would_render(
    gateway: RunningGateway,
    engine: Engine,
    client: openai.OpenAI,
    uid: str,
    messages: Any,
    tools: Any,
) -> None:
    ask(client, messages, max_tokens=1, **tools)
    assert prompts(gateway, uid) == [rendered(engine, messages, **tools)]


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "letters"])
def test_each_prompt_extends_the_one_before_whatever_the_template_strips(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI, uid: str, spelled: bool
) -> None:
    """Spelled in letters, not even the same text would give the sampled ids back."""
    turns: Any = [
        (HELLO, CALLING, ask),
        ([RESULT], "<think>hm</think>seven", streamed),
        ([QUESTION], CALLING.replace('"x":1', '"x" : 2'), streamed),
        ([RESULT, RESULT], "  spaces  ", ask),
        ([QUESTION], "bye", ask),
    ]
    messages: list[Any] = []
    renders = []
    for new, text, call in turns:
        messages += new
        renders.append(rendered(engine, messages, [TOOL]))
        answer = call(client, messages, tools=[TOOL], **say(text, spelled))
        messages.append(answer.choices[0].message.to_dict())
    assert_extended(gateway, uid, len(turns))
    assert prompts(gateway, uid)[0] == renders[0]
    for before, render in zip(sequences(gateway, uid), renders[1:], strict=False):
        assert render[: len(before)] != before, "the template strips nothing: this shows nothing"
    if not spelled:
        responses = [response(step) for step in steps(gateway, uid)]
        assert responses == [[*ids_of(text), EOS] for _, text, _ in turns]


def test_an_end_of_turn_inside_a_call_does_not_end_it(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    """A model may spell the marker in an argument; what follows the answer is the same."""
    arguments = '\n{"name":"f","arguments":{"x":"<|im_end|>\\n"}}\n'
    called = f"<tool_call>{arguments}</tool_call>"
    bias = saying(called)["logit_bias"] | {str(EOS): -100}
    first = ask(client, tools=[TOOL], **say(called, logit_bias=bias))
    ask(client, [*HELLO, first.choices[0].message.to_dict(), *HELLO], tools=[TOOL], max_tokens=1)
    sampled = [IDS["<tool_call>"], *arguments.encode(), IDS["</tool_call>"], EOS]
    assert response(steps(gateway, uid)[0]) == sampled
    assert added(gateway, uid) == THEN_HELLO


def test_an_answer_that_was_cut_is_continued(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    cut = ask(client, max_tokens=9, extra_body=saying("one two three"))
    assert cut.choices[0].message.content == "one two t"
    ask(client, [*HELLO, cut.choices[0].message.to_dict(), *HELLO], max_tokens=1)
    assert added(gateway, uid) == [EOS, *THEN_HELLO]


@pytest.mark.parametrize("call", [ask, streamed])
@pytest.mark.parametrize("tokens", [30, len(ids_of(CALLING))], ids=["inside", "behind"])
def test_a_call_that_was_cut_says_so_and_is_continued(
    gateway: RunningGateway, client: openai.OpenAI, uid: str, call: Any, tokens: int
) -> None:
    cut = call(client, tools=[TOOL], max_tokens=tokens, extra_body=saying(CALLING))
    assert cut.choices[0].finish_reason == "length"
    ask(client, [*HELLO, cut.choices[0].message.to_dict(), *HELLO], tools=[TOOL], max_tokens=1)
    assert response(steps(gateway, uid)[0]) == ids_of(CALLING)[:tokens]
    assert added(gateway, uid) == [EOS, *THEN_HELLO]


def test_an_answer_with_another_end_is_continued(
    gateway: RunningGateway, client: openai.OpenAI, uid: str
) -> None:
    other = IDS["<|endoftext|>"]
    ended = ask(client, extra_body={"allowed_token_ids": [other], "stop_token_ids": [other]})
    ask(client, [*HELLO, ended.choices[0].message.to_dict(), *HELLO], max_tokens=1)
    assert response(steps(gateway, uid)[0]) == [other]
    assert added(gateway, uid) == [EOS, *THEN_HELLO]
