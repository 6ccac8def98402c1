"""Images and files: a short text in tool results, and 400 from the user."""

import json
from typing import Any

import pytest

from gateway.dialects.chat import Chat
from gateway.dialects.messages import Messages
from gateway.dialects.request import Dialect
from gateway.dialects.responses import Responses
from gateway.errors import BadRequest
from gateway.metrics import omitted_attachments

PNG = "data:image/png;base64,AA=="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
HELLO = {"role": "user", "content": "hello"}
DONE = {"type": "text", "text": "done"}


def chat(*parts: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": list(parts)}
    return {"messages": [HELLO, asked, result]}


def messages(*parts: Any) -> dict[str, Any]:
    asked = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
    turns = [
        HELLO,
        {"role": "assistant", "content": [asked]},
        {"role": "user", "content": [result]},
    ]
    return {"max_tokens": 9, "messages": turns}


def responses(*parts: Any) -> dict[str, Any]:
    asked = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": list(parts)}
    return {"input": [HELLO, asked, result]}


RESULTS: list[Any] = [
    (Chat(), chat(DONE, {"type": "image_url", "image_url": {"url": PNG}}), "image/png"),
    (Chat(), chat(DONE, {"type": "image_url", "image_url": PNG}), "image/png"),
    (Messages(), messages(DONE, {"type": "image", "source": SOURCE}), "image/png"),
    (
        Responses(),
        responses(
            {"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": PNG}
        ),
        "image/png",
    ),
]


@pytest.mark.parametrize(("dialect", "body", "media_type"), RESULTS)
def test_an_image_in_a_tool_result_becomes_a_short_text_and_is_counted(
    dialect: Dialect, body: Any, media_type: str
) -> None:
    before = omitted_attachments._value.get()
    message = dialect.parse(json.dumps(body).encode()).messages[-1]
    assert (message["role"], message["content"]) == ("tool", f"done\n[image omitted: {media_type}]")
    assert omitted_attachments._value.get() == before + 1


@pytest.mark.parametrize(
    ("dialect", "body", "text"),
    [
        (Messages(), messages({"type": "document", "source": PDF}), "application/pdf"),
        (Responses(), responses({"type": "input_file", "file_data": f"{PNG}" * 9}), "image/png"),
        (Chat(), chat({"type": "file", "file": {"file_data": "data:text/csv,a"}}), "text/csv"),
    ],
)
def test_so_does_a_file(dialect: Dialect, body: Any, text: str) -> None:
    content = dialect.parse(json.dumps(body).encode()).messages[-1]["content"]
    assert content in (f"[file omitted: {text}]", f"[document omitted: {text}]")


@pytest.mark.parametrize("url", ["https://example.com/a.png", "data:\n]ignore/this", "", None, 5])
def test_only_a_media_type_gets_into_the_text(url: Any) -> None:
    body = chat({"type": "image_url", "image_url": {"url": url}})
    assert Chat().parse(json.dumps(body).encode()).messages[-1]["content"] == "[image omitted]"


IMAGES: list[Any] = [
    (Chat(), {"type": "image_url", "image_url": {"url": PNG}}, "image_url"),
    (Messages(), {"type": "image", "source": SOURCE}, "image"),
    (Responses(), {"type": "input_image", "image_url": PNG}, "input_image"),
]


@pytest.mark.parametrize(("dialect", "image", "kind"), IMAGES)
def test_an_image_from_the_user_is_refused(dialect: Dialect, image: Any, kind: str) -> None:
    turns = [{"role": "user", "content": [image]}]
    body = {"max_tokens": 9, "input" if isinstance(dialect, Responses) else "messages": turns}
    with pytest.raises(BadRequest, match=kind):
        dialect.parse(json.dumps(body).encode())


def test_an_unknown_part_of_a_tool_result_is_refused() -> None:
    with pytest.raises(BadRequest, match="hologram"):
        Chat().parse(json.dumps(chat({"type": "hologram"})).encode())
