"""The pages of the documentation, and their fenced blocks."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- the engine answers: (?P<answers>[^\n]*) -->\n)?"
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
    """JSON list of the texts with which the stub engine answers this block."""

    @property
    def location(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block defines, if its first line is a comment with only a file name."""
        match = FILE_NAME.match(self.text.partition("\n")[0])
        return match[1] if match else None

    @property
    def commands(self) -> str:
        """The commands to run: in a console block, the lines that follow a prompt."""
        if self.language != "console":
            return self.text
        return "".join(line[2:] for line in self.text.splitlines(True) if line.startswith("$ "))


def parse_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for fence in FENCE.finditer(text):
        indent = len(fence["indent"])
        lines = [line[indent:] for line in fence["text"].splitlines(True)]
        line = text.count("\n", 0, fence.start("language")) + 1
        yield Block(page, line, fence["language"], "".join(lines), fence["answers"])
