"""Fenced code blocks (```) in a response."""

import re

BLOCK = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)


def last_block(text: str, *languages: str) -> str:
    """The last block in one of the languages, else the last of any, else the text itself."""
    blocks = [(match[1].lower(), match[2]) for match in BLOCK.finditer(text)]
    named = [block for language, block in blocks if language in languages]
    return (named or [block for _, block in blocks] or [text])[-1]
