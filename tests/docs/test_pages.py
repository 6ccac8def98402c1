"""Runs, loads or parses every fenced block of every page. A new page in docs/ is found automatically.

| language        | what the test does                                                               |
|-----------------|----------------------------------------------------------------------------------|
| sh, console     | run by bash, the page's blocks in order in one folder (`tests.docs.workspace`)    |
| python          | run; a block that begins with a comment like `# rewards.py` is saved as that file |
| toml            | each table is loaded as the settings of its service; a named block is saved       |
| properties      | compared with the settings of the local broker                                    |
| json, yaml      | parsed                                                                            |
| text            | not run: diagrams and output; must not contain a command                          |

Commands that cannot run here are in `tests.docs.unrunnable`, with the reason. A comment
`<!-- the engine answers: ["…"] -->` before a block sets the answers of the stub engine.
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
from tests.docs.interpreter import Interpreter
from tests.docs.pages import PAGES, ROOT, Block, parse_blocks
from tests.docs.unrunnable import UNRUNNABLE
from tests.docs.workspace import PROGRAMS, Workspace
from tests.gateway.client import said
from tests.gateway.stub_engine import StubEngine

FLAGS = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(*make_arg_parser(FlexibleArgumentParser())._option_string_actions)
"""
RUN_LANGUAGES = ("sh", "console", "python")
COMMAND = re.compile(rf"^(\$ |({'|'.join(sorted(PROGRAMS))}|\.venv/bin/\w+|pip|curl|cp|export) )")


@pytest.fixture
def workspace(
    tmp_path: Path, kafka: Broker, stub: StubEngine, tokenizer: Path, interpreter: Interpreter
) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path, kafka.bootstrap, stub.url, tokenizer, interpreter)
    yield workspace
    workspace.close()


def load_toml(block: Block, folder: Path) -> None:
    """Pages show parts of a file, so settings may be missing; everything shown must be valid."""
    file = folder / "shown.toml"
    file.write_text(block.text)
    environ = {"STEPLOG_SASL_PASSWORD": "secret"} if "sasl_username" in block.text else {}
    tables = [key for key, value in tomllib.loads(block.text).items() if isinstance(value, dict)]
    unknown = [table for table in tables if table not in SERVICES]
    assert not unknown, f"{block.location} has {unknown}, which no service has"
    for service in tables or ["topics"]:
        try:
            load(settings_class(service), service, Namespace(config=file), environ)
        except SettingsError as error:
            problems = [text for text in error.problems if " is missing: " not in text]
            assert not problems, f"{block.location}: {problems}"


def compare_properties(block: Block, _: Path) -> None:
    broker = {k: str(v) for k, v in broker_directory._settings("data", 1, 2).items()}
    shown = dict(line.split("=", 1) for line in block.text.splitlines() if line)
    assert shown == {name: broker[name] for name in shown}, block.location


def parse_json(block: Block, _: Path) -> None:
    json.loads(block.text)


def parse_yaml(block: Block, _: Path) -> None:
    yaml.safe_load(block.text)


def reject_commands(block: Block, _: Path) -> None:
    commands = [line for line in block.text.splitlines() if COMMAND.match(line)]
    assert not commands, f"{block.location} hides {commands}: mark the block sh or console"


CHECKS: dict[str, Callable[[Block, Path], None]] = {
    "toml": load_toml,
    "properties": compare_properties,
    "json": parse_json,
    "yaml": parse_yaml,
    "text": reject_commands,
}


FAST_PAGES = ("agents.md",)
"""Pages that are not slow tests; the others start several services each."""
OTHER_TESTS = ("coding-agents.md",)
"""Pages that have a test of their own, which runs their blocks and looks at the log."""


@pytest.mark.broker
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=() if p.name in FAST_PAGES else pytest.mark.slow)
        for p in PAGES
        if p.name not in OTHER_TESTS
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_work(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    blocks = list(parse_blocks(page))
    unknown = [b.location for b in blocks if b.language not in (*RUN_LANGUAGES, *CHECKS)]
    assert not unknown, f"blocks with an unknown language: {unknown}; see the table above"
    workspace: Workspace | None = None
    if any(block.language in RUN_LANGUAGES for block in blocks):
        workspace = request.getfixturevalue("workspace")
    for block in blocks:
        if block.language in CHECKS:
            CHECKS[block.language](block, tmp_path)
            if workspace is not None:
                workspace.save(block)
        elif workspace is not None:
            stub: StubEngine = request.getfixturevalue("stub")
            stub.script([said(text) for text in json.loads(block.answers or "[]")])
            workspace.run(block)


def test_every_link_has_a_target() -> None:
    anchors = {page: set(anchors_of(page.read_text())) for page in PAGES}
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors[file], f"{page.name} links to {target}"


def anchors_of(text: str) -> list[str]:
    """The anchors that GitHub derives from headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_links_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme]
    assert not missing, f"README.md has no link to {missing}"


def test_every_unrunnable_command_is_used() -> None:
    shown = "\n".join(block.text for page in PAGES for block in parse_blocks(page))
    unused = [words for words in UNRUNNABLE if " ".join(words) not in shown]
    assert not unused, f"no page shows {unused}"


@pytest.mark.heavy
@pytest.mark.slow
def test_vllm_accepts_the_flags() -> None:
    """The flags of every `vllm serve` in a page or example."""
    texts = [block.text for page in PAGES for block in parse_blocks(page)]
    texts.append((ROOT / "examples" / "stack.toml").read_text())
    listing = subprocess.run(
        [sys.executable, "-c", FLAGS], capture_output=True, text=True, check=True
    )
    known = set(listing.stdout.split())
    shown = re.findall(r"vllm serve ((?:[^\n\\\"]|\\\n|\n +|\"(?!\"\"))+)", "\n".join(texts))
    flags = {flag for command in shown for flag in re.findall(r"(?<!\S)--[a-z-]+", command)}
    assert flags and flags <= known, flags - known
