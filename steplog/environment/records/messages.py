"""One message of a conversation as HTML: reasoning, text, tool calls and pictures.

Everything that a model or a tool wrote is escaped. The end of a long text is folded away.
"""

import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
UNFOLDED = 2_000
"""Characters of a text that are shown without unfolding it."""
SLACK = 500
"""A text that is longer by at most this is shown in full: unfolding one more line is a nuisance."""
LINE = 80
FENCE = re.compile(r"^```[^\n]*\n(.*?)(?:^```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A code block as models write it; the end of the text may cut it."""
PICTURE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")


def render_message(message: Json) -> str:
    role = str(message.get("role", ""))
    kind = role if role in ROLES else "user"
    parts = [_render_reasoning(message.get("reasoning") or message.get("reasoning_content"))]
    parts += map(_render_part, _content_parts(message.get("content"), is_result=role == "tool"))
    parts += map(_render_call, message.get("tool_calls") or ())
    body = "".join(parts) or "<p class=dim>empty</p>"
    return f'<div class="turn {kind}"><div class=role>{escape_text(role)}</div>{body}</div>'


def render_data(value: Any) -> str:
    """Text, or any JSON value."""
    if isinstance(value, str):
        return render_text(value)
    return f"<pre class=code>{fold(_pretty(value))}</pre>"


def render_text(value: str) -> str:
    """Text with its code blocks."""
    pieces = FENCE.split(value)
    blocks = []
    for number, piece in enumerate(pieces):
        if number % 2:
            blocks.append(f"<pre class=code>{fold(piece.rstrip())}</pre>")
        elif piece.strip():
            blocks.append(f"<pre>{fold(piece.strip())}</pre>")
    return "".join(blocks)


def fold(value: str) -> str:
    """Escaped text whose end, if it is long, is folded away."""
    if len(value) <= UNFOLDED + SLACK:
        return escape_text(value)
    cut = max(value.rfind(" ", 0, UNFOLDED), value.rfind("\n", 0, UNFOLDED)) + 1 or UNFOLDED
    summary = f"{len(value) - cut:,} more characters"
    return (
        f"{escape_text(value[:cut])}<details class=rest><summary>{summary}</summary>"
        f"{escape_text(value[cut:])}</details>"
    )


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def escape_text(value: Any) -> str:
    return escape(str(value))


def _render_reasoning(reasoning: Any) -> str:
    if not reasoning:
        return ""
    summary = f"reasoning, {len(str(reasoning)):,} characters"
    body = render_text(str(reasoning))
    return f"<details class=thought><summary>{summary}</summary>{body}</details>"


def _content_parts(content: Any, *, is_result: bool) -> list[Any]:
    if content in (None, "", []):
        return []
    if is_result and isinstance(content, str):
        return [_parse_json(content)]
    return content if isinstance(content, list) else [content]


def _render_part(part: Any) -> str:
    """A string, a content part in OpenAI's form, or any other value."""
    if not isinstance(part, Mapping):
        return render_data(part)
    text = part.get("text")
    if isinstance(text, str):
        return render_text(text)
    image = part.get("image_url")
    if image is not None:
        return _render_picture(str(image.get("url") if isinstance(image, Mapping) else image))
    return render_data(part)


def _render_picture(url: str) -> str:
    if PICTURE.fullmatch(url):
        return f'<img alt="" src="{escape_text(url)}">'
    return f"<p class=dim>picture: {escape_text(url[:200])}</p>"


def _render_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return render_data(call)
    arguments = _parse_json(as_text(function.get("arguments") or ""))
    body = f"<pre class=code>{fold(_pretty(arguments))}</pre>" if arguments else ""
    return f"<div class=call><b>{escape_text(function.get('name'))}</b>{body}</div>"


def _parse_json(value: str) -> Any:
    """The object or list, or the text itself: arguments and results are mostly JSON."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict | list) else value


def _pretty(value: Any) -> str:
    """On one line if it fits."""
    if isinstance(value, str):
        return value
    line = as_text(value)
    return (
        line if len(line) <= LINE else json.dumps(value, indent=2, ensure_ascii=False, default=str)
    )
