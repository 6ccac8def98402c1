"""Images and files in tool results, which the gateway does not pass on: a short text takes their place.

An agent that opens a picture by mistake goes on with its work this way. An image from the user is
refused instead: without it, the task would be another one."""

import re
from typing import Any

from gateway import metrics

KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "document": "document",
    "file": "file",
    "input_file": "file",
}
"""What the parts of the three APIs hold, by their type."""
MEDIA_TYPE = re.compile(r"(?:data:)?([\w.+-]{1,40}/[\w.+-]{1,40})(?:[;,].*)?", re.DOTALL)


def omitted_text(part_type: str, source: Any) -> str:
    """What stands for an image or a file, given its media type or a data URL that begins with it. The
    type is one of `KINDS`."""
    kind = KINDS[part_type]
    metrics.omitted_attachments.inc()
    found = MEDIA_TYPE.fullmatch(source[:200]) if isinstance(source, str) else None
    return f"[{kind} omitted: {found[1]}]" if found else f"[{kind} omitted]"
