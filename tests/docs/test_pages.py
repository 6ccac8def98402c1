"""Every block of every page is run, loaded or read. A new page in docs/ is found by itself.

| language        | what is done                                                                     |
|-----------------|----------------------------------------------------------------------------------|
| sh, console     | run by bash, the page's blocks in order in one folder (`tests.docs.place`)        |
| python          | run; one that begins with a comment like `# rewards.py` is that file from then on |
| toml            | each table is loaded as the settings that it belongs to; a named one is kept       |
| properties      | the local broker has the same settings                                            |
| json, yaml      | parsed                                                                            |
| text            | not run: pictures and output; it must not hold a command                          |

What cannot run here is in `tests.docs.elsewhere`, with the reason. A comment `<!-- the engine answers:
["…"] -->` before a block says what the model shall say to it.
"""

import json
import re
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from steplog.kafka import broker_directory
from steplog.kafka.local_kafka import Broker
from steplog.settings import SERVICES, SettingsError, load, settings_class
from tests.docs.elsewhere import ELSEWHERE
from tests.docs.interpreter import Interpreter
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.docs.place import PROGRAMS, Place
from tests.gateway.asking import said
from tests.gateway.stub_engine import StubEngine

FLAGS = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(*make_arg_parser(FlexibleArgumentParser())._option_string_actions)
"""
RUN = ("sh", "console", "python")
COMMAND = re.compile(rf"^(\$ |({'|'.join(sorted(PROGRAMS))}|\.venv/bin/\w+|pip|curl|cp|export) )")


@pytest.fixture
def place(
    tmp_path: Path, kafka: Broker, stub: StubEngine, tokenizer: Path, interpreter: Interpreter
) -> Iterator[Place]:
    place = Place(tmp_path, kafka.bootstrap, stub.url, tokenizer, interpreter)
    yield place
    place.close()


def load_toml(block: Block, folder: Path) -> None:
    """Pages show parts of a file, so what is missing is missing; all else must be right."""
    file = folder / "shown.toml"
    file.write_text(block.text)
    environ = {"STEPLOG_SASL_PASSWORD": "secret"} if "sasl_username" in block.text else {}
    tables = [key for key, value in tomllib.loads(block.text).items() if isinstance(value, dict)]
    unknown = [table for table in tables if table not in SERVICES]
    assert not unknown, f"{block.where} has {unknown}, which are nobody's settings"
    for service in tables or ["topics"]:
        try:
            load(settings_class(service), service, Namespace(config=file), environ)
        except SettingsError as error:
            wrong = [told for told in error.problems if " is missing: " not in told]
            assert not wrong, f"{block.where}: {wrong}"


def compare_properties(block: Block, _: Path) -> None:
    ours = {k: str(v) for k, v in broker_directory._settings("data", 1, 2).items()}
    shown = dict(line.split("=", 1) for line in block.text.splitlines() if line)
    assert shown == {name: ours[name] for name in shown}, block.where


def read_json(block: Block, _: Path) -> None:
    json.loads(block.text)


def read_yaml(block: Block, _: Path) -> None:
    yaml.safe_load(block.text)


def look_for_commands(block: Block, _: Path) -> None:
    found = [line for line in block.text.splitlines() if COMMAND.match(line)]
    assert not found, f"{block.where} hides {found}: mark the block sh or console"


READ: dict[str, Callable[[Block, Path], None]] = {
    "toml": load_toml,
    "properties": compare_properties,
    "json": read_json,
    "yaml": read_yaml,
    "text": look_for_commands,
}


RUN_OFTEN = ("agents.md",)
"""Pages that are no slow tests; the others start several services each."""


@pytest.mark.broker
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=() if p.name in RUN_OFTEN else pytest.mark.slow) for p in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_do_what_it_says(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = list(blocks(page))
    strange = [b.where for b in found if b.language not in (*RUN, *READ)]
    assert not strange, f"nobody runs or reads the blocks at {strange}: see the table above"
    place: Place | None = None
    if any(block.language in RUN for block in found):
        place = request.getfixturevalue("place")
    for block in found:
        if block.language in READ:
            READ[block.language](block, tmp_path)
            if place is not None:
                place.keep(block)
        elif place is not None:
            stub: StubEngine = request.getfixturevalue("stub")
            stub.script([said(text) for text in json.loads(block.answers or "[]")])
            place.run(block)


def test_every_link_leads_somewhere() -> None:
    anchors = {page: set(anchors_of(page.read_text())) for page in PAGES}
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors[file], f"{page.name} links to {target}"


def anchors_of(text: str) -> list[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme]
    assert not missing, f"README.md has no link to {missing}"


def test_what_is_elsewhere_is_used() -> None:
    shown = "\n".join(block.text for page in PAGES for block in blocks(page))
    unused = [words for words in ELSEWHERE if " ".join(words) not in shown]
    assert not unused, f"no page shows {unused}"


@pytest.mark.slow
def test_vllm_takes_the_flags() -> None:
    """Of every `vllm serve` that a page or example shows."""
    texts = [block.text for page in PAGES for block in blocks(page)]
    texts.append((ROOT / "examples" / "stack.toml").read_text())
    told = subprocess.run([sys.executable, "-c", FLAGS], capture_output=True, text=True, check=True)
    known = set(told.stdout.split())
    shown = re.findall(r"vllm serve ((?:[^\n\\\"]|\\\n|\n +|\"(?!\"\"))+)", "\n".join(texts))
    flags = {flag for command in shown for flag in re.findall(r"(?<!\S)--[a-z-]+", command)}
    assert flags and flags <= known, flags - known
