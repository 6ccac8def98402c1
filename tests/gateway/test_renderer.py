"""Messages to ids and ids to text, with both templates."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.request import Request
from gateway.errors import BadRequest
from gateway.tokens.renderer import Renderer, UnusableTokenizer, cut_at_stop
from tests.gateway.client import ids_of
from tests.tiny_model import EOS, PLAIN, STRIPPING, build_tokenizer

HELLO = {"role": "user", "content": "hello"}
NEXT = {"role": "user", "content": "go on"}
THOUGHT = "<think>\nlet me see\n</think>\n\nwell"
BETWEEN = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
CALLS = [{"function": {"name": "look", "arguments": {"at": "<|im_end|> home"}}}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
STRICT = "{%- if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}" + PLAIN
HIDING = "{%- for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"

Make = Callable[[str], Renderer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    from transformers import PreTrainedTokenizerFast

    known: dict[str, Renderer] = {}

    def make(template: str) -> Renderer:
        if template not in known:
            folder = build_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
            known[template] = Renderer(PreTrainedTokenizerFast.from_pretrained(folder))
        return known[template]

    return make


@pytest.fixture(params=[PLAIN, STRIPPING], ids=["plain", "stripping"])
def renderer(request: pytest.FixtureRequest, made: Make) -> Renderer:
    return made(request.param)


def asking(*messages: Any, **fields: Any) -> Request:
    return Request(messages=list(messages), **fields)


def test_a_prompt_is_the_templates(renderer: Renderer) -> None:
    assert renderer.prompt(asking({"role": "system", "content": "be brief"}, HELLO)).ids == ids_of(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_prompt_of_text_or_ids_needs_no_template(renderer: Renderer) -> None:
    assert renderer.prompt(Request(prompt="é<think>")).ids == ids_of("é<think>")
    assert renderer.prompt(Request(prompt=[7, 8])).ids == [7, 8]


def test_rendering_anew_would_not_give_the_sampled_ids_back(made: Make) -> None:
    """Else continuing exactly would be no feat."""
    stripping = made(STRIPPING)
    first = stripping.prompt(asking(HELLO)).ids
    anew = stripping.prompt(asking(HELLO, {"role": "assistant", "content": THOUGHT}, NEXT)).ids
    assert anew[: len(first)] == first
    assert anew[len(first) :] != [*ids_of(THOUGHT), EOS, *ids_of(BETWEEN)]


@pytest.mark.parametrize("content", ["well", "", THOUGHT, "marker", "<|im_end|>"])
def test_what_follows_an_answer_depends_on_the_rest_alone(renderer: Renderer, content: str) -> None:
    request = asking(HELLO, {"role": "assistant", "content": content}, NEXT)
    assert renderer.continuation(request, 2, EOS) == ids_of(BETWEEN)


def test_an_answer_without_its_end_of_turn_gets_one(renderer: Renderer) -> None:
    request = asking(HELLO, {"role": "assistant", "content": "wel"}, NEXT)
    assert renderer.continuation(request, 2, ord("l")) == [EOS, *ids_of(BETWEEN)]


@pytest.mark.parametrize(("last", "end"), [(EOS, []), (ord("}"), [EOS])])
def test_tool_calls_are_not_spelled_again(renderer: Renderer, last: int, end: list[int]) -> None:
    answer = {"role": "assistant", "content": "I look.", "tool_calls": CALLS}
    request = asking(HELLO, answer, {"role": "tool", "content": "a house"}, tools=TOOLS)
    assert renderer.continuation(request, 2, last) == end + ids_of(
        "\n<|im_start|>user\n<tool_response>\na house\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_several_messages_may_follow(renderer: Renderer) -> None:
    answers = [
        {"role": "assistant", "content": "", "tool_calls": CALLS * 2},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "made up"},
        NEXT,
    ]
    request = asking(HELLO, *answers, tools=TOOLS)
    assert renderer.continuation(request, 2, EOS) == ids_of(
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nmade up<|im_end|>" + BETWEEN
    )


def test_a_template_that_hides_answers_tells_no_continuation(made: Make) -> None:
    request = asking(HELLO, {"role": "assistant", "content": "well"}, NEXT)
    assert made(HIDING).continuation(request, 2, EOS) is None


def test_a_template_that_refuses_is_the_clients_mistake(made: Make) -> None:
    with pytest.raises(BadRequest, match="too long"):
        made(STRICT).prompt(asking(*[HELLO, NEXT] * 3))


def test_variables_reach_the_template_and_its_own_parameters_do_not(made: Make) -> None:
    renderer = made("{{ messages[0].content }}{{ mood }}")
    assert renderer.prompt(asking(HELLO, template={"mood": "!"})).ids == ids_of("hello!")
    for name in ("tokenize", "chat_template", "add_generation_prompt", "tools"):
        with pytest.raises(BadRequest, match=name):
            renderer.prompt(asking(HELLO, template={name: "x"}))


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnusableTokenizer, match="not a folder"):
        Renderer.load(str(tmp_path / "none"))


# Text


@pytest.mark.parametrize("text", ["plain", "né€😀!", "a\ufffdb", "<think>x</think>", ""])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("stop", [[], ["STOP"], ["S", "!!"]])
def test_a_stream_of_ids_tells_the_text_bit_by_bit(
    made: Make, text: str, size: int, stop: list[str]
) -> None:
    renderer, sampling = made(PLAIN), {"stop": stop}
    ids = [*ids_of(text), EOS]
    stream = renderer.text_stream(sampling)
    told = [stream.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    whole, stopped = renderer.text(ids, sampling)
    assert "".join(told) + stream.end(whole) == whole == text
    assert stopped is None
    assert not any("\ufffd" in part for part in told) or "\ufffd" in text


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("kept", [False, True])
def test_a_stop_string_is_never_told_by_a_stream(made: Make, size: int, kept: bool) -> None:
    renderer = made(PLAIN)
    sampling = {"stop": ["STOP", "OPS"], "include_stop_str_in_output": kept}
    ids = ids_of("one STOP")
    stream = renderer.text_stream(sampling)
    told = "".join(stream.feed(ids[at : at + size]) for at in range(0, len(ids), size))
    whole, stopped = renderer.text(ids, sampling)
    assert (told + stream.end(whole), stopped) == ("one STOP" if kept else "one ", "STOP")


@pytest.mark.parametrize(
    ("text", "stops", "cut"),
    [
        ("abc", [], ("abc", None)),
        ("abc", ["x"], ("abc", None)),
        ("abcabc", ["c", "b"], ("a", "b")),
        ("abc", ["abc"], ("", "abc")),
        ("abc", ["bc", "b"], ("a", "b")),
    ],
)
def test_the_first_stop_string_cuts(text: str, stops: list[str], cut: tuple[str, str]) -> None:
    assert cut_at_stop(text, {"stop": stops}) == cut


@pytest.mark.parametrize(
    ("text", "end", "stop", "spoken"),
    [
        ("well", [EOS], [], "well"),
        ("well", [], [], "well"),
        ("well STOP", [], ["STOP"], "well "),
        ("STOP", [], ["STOP"], ""),
        ("", [EOS], [], ""),
    ],
)
def test_the_parser_gets_the_ids_without_their_end(
    made: Make, text: str, end: list[int], stop: list[str], spoken: str
) -> None:
    renderer = made(PLAIN)
    ids = ids_of(text) + end
    sampling = {"stop": stop}
    told, found = renderer.text(ids, sampling)
    assert list(renderer.without_end(ids, told, sampling, found is not None)) == ids_of(spoken)
