"""Prompts are rendered once, unless rendering them again could give something else."""

from typing import Any

import pytest

from gateway.dialects.request import Request
from gateway.tokens.prompts import Prompt, PromptCache
from schemas.packing import pack_ids

HELLO = {"role": "user", "content": "hello"}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


class Rendering:
    """Counts, and gives other ids every time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, request: Request) -> list[int]:
        self.count += 1
        return [self.count] * len(str(request.messages))


def test_equal_conversations_are_rendered_once() -> None:
    prompts = PromptCache(Rendering(), "{{ messages }}")
    first = prompts.get(Request(messages=[HELLO], tools=TOOLS, sampling={"temperature": 1}))
    assert prompts.get(Request(messages=[dict(HELLO)], tools=TOOLS, model="other")) is first


@pytest.mark.parametrize(
    "other",
    [
        Request(messages=[HELLO, HELLO]),
        Request(messages=[HELLO | {"name": "x"}]),
        Request(messages=[{"content": "hello", "role": "user"}]),
        Request(messages=[HELLO], tools=TOOLS),
        Request(messages=[HELLO], template={"enable_thinking": False}),
        Request(messages=[HELLO], template={"at": 10**30}),
    ],
)
def test_whatever_a_template_may_see_counts(other: Request) -> None:
    prompts = PromptCache(Rendering(), "{{ messages }}")
    assert prompts.get(Request(messages=[HELLO])) is not prompts.get(other)


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{{ ['a', 'b'] | random }}",
        "{{ lipsum() }}",
        {"default": "{{ messages }}", "tool_use": "{{ strftime_now('%d') }}"},
    ],
)
def test_a_template_that_looks_at_clock_or_chance_is_rendered_every_time(template: Any) -> None:
    prompts = PromptCache(Rendering(), template)
    asked = Request(messages=[HELLO])
    assert prompts.get(asked).ids != prompts.get(asked).ids


def test_memory_is_bounded() -> None:
    rendering = Rendering()
    prompts = PromptCache(rendering, "", cache_bytes=100_000)
    for number in range(200):
        prompts.get(Request(messages=[HELLO | {"content": f"{number}"}]))
    assert len(prompts._cache._entries) < 100
    prompts.get(Request(messages=[HELLO | {"content": "199"}]))
    assert rendering.count == 200


def test_a_failure_is_not_remembered() -> None:
    def refuse(_: Request) -> list[int]:
        raise ValueError("no")

    prompts = PromptCache(refuse, "")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            prompts.get(Request(messages=[HELLO]))


def test_a_prompt_is_packed_as_steps_have_it() -> None:
    assert Prompt([1, 2, 3]).packed == pack_ids([1, 2, 3])
    continued = Prompt.continued(pack_ids([1, 2]), [3])
    assert (continued.ids, continued.packed) == ([1, 2, 3], pack_ids([1, 2, 3]))
    assert len(continued) == 3


def test_ids_that_no_step_can_hold_are_the_engines_to_refuse() -> None:
    assert Prompt([2**40]).ids == [2**40]
