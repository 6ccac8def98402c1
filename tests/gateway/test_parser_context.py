"""What an engine's parser gets of a prompt while an answer is streamed."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.request import AnswerDelta, Request
from gateway.engines.wire import ParsedMessage, SampledTokens
from gateway.tokens.parser_context import END, parser_context
from gateway.tokens.parsers import EngineParser
from gateway.tokens.renderer import Renderer
from tests.gateway.client import TOOLS, ids_of
from tests.tiny_model import IDS

MARKERS = set(IDS.values())
OPEN, CLOSE = IDS["<think>"], IDS["</think>"]


class CountingParser:
    """An engine whose parser takes every id for text."""

    def __init__(self) -> None:
        self.contexts: list[list[int]] = []

    async def parse_chunk(
        self,
        ids: Sequence[int],
        context: Sequence[int],
        chat: Mapping[str, Any],  # noqa: ARG002
        state: msgspec.Raw | None,  # noqa: ARG002
        last: bool,  # noqa: ARG002
    ) -> tuple[ParsedMessage, msgspec.Raw]:
        self.contexts.append(list(context))
        return ParsedMessage(content=bytes(ids).decode()), msgspec.Raw(b"{}")


def test_a_long_prompt_does_not_go_to_the_parser_with_every_part(tokenizer: Path) -> None:
    prompt = ids_of("<|im_start|>user\n" + "word " * 8000 + "<|im_end|>\n<|im_start|>assistant\n")
    parser: Any = CountingParser()
    deltas: list[AnswerDelta] = []

    async def stream(renderer: Renderer) -> None:
        sample = SampledTokens()
        request = Request(tools=TOOLS)
        parsing = EngineParser(renderer, parser, request, prompt, deltas.append)
        for token in b"seventy-seven parts " * 4:
            sample.ids.append(token)
            parsing.feed(sample)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await parsing.end(sample)

    asyncio.run(stream(Renderer.load(str(tokenizer))))
    assert len(parser.contexts) > 70
    assert sum(map(len, parser.contexts)) < len(prompt)
    assert "".join(delta.content for delta in deltas) == "seventy-seven parts " * 4


def test_a_short_prompt_is_sent_as_it_is() -> None:
    prompt = ids_of("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert parser_context(prompt, MARKERS) == prompt


def test_reasoning_that_ended_before_a_long_tool_result_is_known_to_have_ended() -> None:
    result = ids_of("<tool_response>" + "line\n" * 20_000)
    prompt = [*ids_of("<think>I look</think><tool_call>x</tool_call>"), *result]
    context = parser_context(prompt, MARKERS)
    assert len(context) < END + 100
    assert context.index(OPEN) < context.index(CLOSE)


def test_a_marker_keeps_the_words_next_to_it() -> None:
    channel = IDS["<|im_start|>"]
    prompt = [*[9] * 1000, channel, 7, 8, *[9] * 5000]
    context = parser_context(prompt, {channel})
    at = context.index(channel)
    assert context[at : at + 3] == [channel, 7, 8]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 400)), max_size=30),
    st.integers(0, 300),
)
def test_the_order_of_the_last_markers_is_that_of_the_prompt(
    runs: list[tuple[int, int]], rest: int
) -> None:
    """A run is a marker and the ordinary ids after it."""
    prompt = [token for marker, words in runs for token in (marker, *[99] * words)] + [99] * rest
    context = parser_context(prompt, range(5))
    assert context[-END:] == prompt[-END:]
    for one, other in itertools.combinations(range(5), 2):
        pair = {one, other}
        assert _last(context, pair) == _last(prompt, pair)


def _last(ids: list[int], wanted: set[int]) -> int | None:
    return next((token for token in reversed(ids) if token in wanted), None)


@pytest.mark.parametrize("length", [0, 1, END, END + 1])
def test_prompts_of_any_length(length: int) -> None:
    prompt = [*range(300, 300 + length)]
    assert parser_context(prompt, MARKERS) == prompt[-END:]
