"""The pages of the documentation, and their fenced blocks."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- the engine answers: (?P<answers>.*) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|toml))$")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    answers: str | None
    """JSON: the texts that the engine is to say to this block."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block is, if its first line is a comment with just a name."""
        named = FILE_NAME.match(self.text.partition("\n")[0])
        return named[1] if named else None

    @property
    def commands(self) -> str:
        """The shell's part: of a console, what follows the prompts."""
        if self.language != "console":
            return self.text
        return "".join(line[2:] for line in self.text.splitlines(True) if line.startswith("$ "))


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        indent = len(found["indent"])
        lines = [line[indent:] for line in found["text"].splitlines(True)]
        place = text.count("\n", 0, found.start("language")) + 1
        yield Block(page, place, found["language"], "".join(lines), found["answers"])
