"""Pages that send a reader to a file name one that is there."""

import re

import pytest

from tests.docs.pages import ROOT

PATH = re.compile(r"`((?:[\w.]+/)+[\w.]*)`")
OURS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/development.md"])
def test_every_path_of_the_page_exists(page: str) -> None:
    paths = PATH.findall((ROOT / page).read_text())
    ours = [path for path in paths if path.partition("/")[0] in OURS]
    assert ours
    assert [path for path in ours if not (ROOT / path).exists()] == []
