"""Every file or folder of the repository that a page mentions exists."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
DOCUMENTS = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]


def repository_paths(page: Path) -> list[str]:
    return [path for path in PATH.findall(page.read_text()) if path.partition("/")[0] in FOLDERS]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_the_page_exists(page: Path) -> None:
    assert [path for path in repository_paths(page) if not (ROOT / path).exists()] == []


def test_the_architecture_page_mentions_paths() -> None:
    assert len(repository_paths(ROOT / "docs" / "architecture.md")) > 20
