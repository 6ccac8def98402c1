"""System turns after the first message, with templates that render them and templates that do not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.messages import Messages
from gateway.dialects.request import Request
from gateway.tokens.late_system_turns import MARK
from gateway.tokens.renderer import Renderer
from pool.connection import Connection
from tests.gateway.client import chat, ids_of, prompts, said, text
from tests.gateway.running import running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.tiny_model import EOS, PLAIN, build_tokenizer

HELLO = {"role": "user", "content": "hello"}
NEXT = {"role": "user", "content": "go on"}
RULES = {"role": "system", "content": "be brief"}
NOTICE = {"role": "system", "content": "a file changed"}
WELL = {"role": "assistant", "content": "well"}
REFUSING = (
    "{%- for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    + PLAIN
)
"""As Qwen3.5 does."""
HOISTING = (
    "{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{%- for m in messages if m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
"""As DeepSeek V3 does."""
ALTERNATING = (
    "{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "{%- for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
"""As Mistral and Gemma do."""

Make = Callable[[str], Renderer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    from transformers import PreTrainedTokenizerFast

    def make(template: str) -> Renderer:
        folder = build_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
        return Renderer(PreTrainedTokenizerFast.from_pretrained(folder))

    return make


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def prompt(renderer: Renderer, *messages: Any) -> list[int]:
    return renderer.prompt(Request(messages=list(messages))).ids


ASSISTANT = "<|im_start|>assistant\n"
SHOWN = f"{MARK}\na file changed"


def test_a_template_that_takes_system_turns_anywhere_gets_them(made: Make) -> None:
    assert prompt(made(PLAIN), RULES, HELLO, NOTICE) == ids_of(
        turn("system", "be brief")
        + turn("user", "hello")
        + turn("system", "a file changed")
        + ASSISTANT
    )


def test_for_a_template_that_refuses_it_a_late_system_turn_is_the_users_and_marked(
    made: Make,
) -> None:
    assert prompt(made(REFUSING), RULES, HELLO, NOTICE) == ids_of(
        turn("system", "be brief") + turn("user", "hello") + turn("user", SHOWN) + ASSISTANT
    )


def test_a_template_that_would_move_it_to_the_front_gets_it_in_its_place(made: Make) -> None:
    assert prompt(made(HOISTING), RULES, HELLO, NOTICE) == ids_of(
        "be brief" + turn("user", "hello") + turn("user", SHOWN) + ASSISTANT
    )


def test_a_template_that_wants_turns_to_alternate_gets_it_within_the_users_turn(
    made: Make,
) -> None:
    messages = [HELLO, NOTICE, WELL, NOTICE, NEXT, WELL, NOTICE]
    assert prompt(made(ALTERNATING), *messages) == ids_of(
        turn("user", f"hello\n\n{SHOWN}")
        + turn("assistant", "well")
        + turn("user", f"{SHOWN}\n\ngo on")
        + turn("assistant", "well")
        + turn("user", SHOWN)
        + ASSISTANT
    )


def test_turns_of_the_user_are_joined_only_for_a_system_turn(made: Make) -> None:
    with pytest.raises(Exception, match="roles must alternate"):
        prompt(made(ALTERNATING), HELLO, NEXT, WELL, NOTICE)


@pytest.mark.parametrize("template", [REFUSING, HOISTING, ALTERNATING])
def test_the_next_prompt_extends_the_one_before(made: Make, template: str) -> None:
    renderer = made(template)
    first = prompt(renderer, RULES, HELLO, NOTICE)
    messages = [RULES, HELLO, NOTICE, WELL, NOTICE, NEXT]
    tail = renderer.continuation(Request(messages=messages), 4, EOS)
    assert tail is not None
    assert [*first, *ids_of("well"), EOS, *tail] == prompt(renderer, *messages)


def test_a_call_of_claude_code_is_rendered(made: Make) -> None:
    body = {
        "max_tokens": 9,
        "system": "be brief",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}, NOTICE],
    }
    request = Messages().parse(json.dumps(body).encode())
    assert made(REFUSING).prompt(request).ids == ids_of(
        turn("system", "be brief") + turn("user", "hello") + turn("user", SHOWN) + ASSISTANT
    )


@pytest.mark.broker
def test_a_gateway_serves_late_system_turns_though_its_template_refuses_them(
    log: Connection, stub: StubEngine, tmp_path: Path, uid: str, prompt_uid: str
) -> None:
    """It starts a gateway, because templates are probed when one starts."""
    folder = build_tokenizer(tmp_path, REFUSING)
    with running_gateway(log, [stub.url], folder) as gateway:
        stub.script([said("well"), said("done")])
        chat(gateway, uid, prompt_uid, [HELLO, NOTICE])
        reply = chat(gateway, uid, prompt_uid, [HELLO, NOTICE, WELL, NEXT])
        assert text(reply) == "done"
        first, second = prompts(gateway, uid)
    marked = turn("user", "hello") + turn("user", f"{MARK}\n{NOTICE['content']}")
    assert first == ids_of(marked + "<|im_start|>assistant\n")
    assert second[: len(first)] == first
