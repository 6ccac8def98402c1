"""One message of a conversation as HTML: what was thought, said, called and shown.

All that a model or a tool wrote is escaped. The end of a long text is folded away.
"""

import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
SHOWN = 2_000
"""Characters of a text that are not folded."""
SLACK = 500
"""So much more is shown with them: to unfold a line is a nuisance."""
LINE = 80
FENCE = re.compile(r"^```[^\n]*\n(.*?)(?:^```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A block of code as models write it, which the end may cut."""
PICTURE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")


def turn(message: Json) -> str:
    role = str(message.get("role", ""))
    kind = role if role in ROLES else "user"
    parts = [_thought(message.get("reasoning") or message.get("reasoning_content"))]
    parts += map(_part, _parts(message.get("content"), is_result=role == "tool"))
    parts += map(_call, message.get("tool_calls") or ())
    shown = "".join(parts) or "<p class=dim>nothing</p>"
    return f'<div class="turn {kind}"><div class=role>{text(role)}</div>{shown}</div>'


def data(value: Any) -> str:
    """Something that may be text, or any JSON."""
    if isinstance(value, str):
        return prose(value)
    return f"<pre class=code>{folded(_pretty(value))}</pre>"


def prose(said: str) -> str:
    """Text with its blocks of code."""
    pieces = FENCE.split(said)
    shown = []
    for number, piece in enumerate(pieces):
        if number % 2:
            shown.append(f"<pre class=code>{folded(piece.rstrip())}</pre>")
        elif piece.strip():
            shown.append(f"<pre>{folded(piece.strip())}</pre>")
    return "".join(shown)


def folded(said: str) -> str:
    if len(said) <= SHOWN + SLACK:
        return text(said)
    at = max(said.rfind(" ", 0, SHOWN), said.rfind("\n", 0, SHOWN)) + 1 or SHOWN
    rest = f"{len(said) - at:,} characters more"
    return (
        f"{text(said[:at])}<details class=rest><summary>{rest}</summary>{text(said[at:])}</details>"
    )


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def text(value: Any) -> str:
    return escape(str(value))


def _thought(thought: Any) -> str:
    if not thought:
        return ""
    words = f"thought, {len(str(thought)):,} characters"
    return f"<details class=thought><summary>{words}</summary>{prose(str(thought))}</details>"


def _parts(content: Any, *, is_result: bool) -> list[Any]:
    if content in (None, "", []):
        return []
    if is_result and isinstance(content, str):
        return [_parsed(content)]
    return content if isinstance(content, list) else [content]


def _part(part: Any) -> str:
    """A string, a part of a message as OpenAI has them, or whatever else stands there."""
    if not isinstance(part, Mapping):
        return data(part)
    said = part.get("text")
    if isinstance(said, str):
        return prose(said)
    image = part.get("image_url")
    if image is not None:
        return _picture(str(image.get("url") if isinstance(image, Mapping) else image))
    return data(part)


def _picture(url: str) -> str:
    if PICTURE.fullmatch(url):
        return f'<img alt="" src="{text(url)}">'
    return f"<p class=dim>picture: {text(url[:200])}</p>"


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return data(call)
    given = _parsed(plain(function.get("arguments") or ""))
    shown = f"<pre class=code>{folded(_pretty(given))}</pre>" if given else ""
    return f"<div class=call><b>{text(function.get('name'))}</b>{shown}</div>"


def _parsed(said: str) -> Any:
    """Arguments and results are mostly JSON."""
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return said
    return found if isinstance(found, dict | list) else said


def _pretty(value: Any) -> str:
    """On one line if it fits there."""
    if isinstance(value, str):
        return value
    line = plain(value)
    return (
        line if len(line) <= LINE else json.dumps(value, indent=2, ensure_ascii=False, default=str)
    )
