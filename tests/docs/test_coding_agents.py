"""Every run of docs/coding-agents.md, with the real agent: its calls are trainable Steps that continue
each other, and its trajectory ends with a reward.

The agents are processes of npm's and Python's packages (`tests.agents`), which no fork can replace."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.core.prompts import full_prompts
from pool.topics import STEPS
from schemas import Step, TrajectoryEnd
from schemas.packing import unpack_ids
from steplog.kafka.local_kafka import Broker
from tests.agents import AGENTS, missing_installer
from tests.docs.interpreter import Interpreter
from tests.docs.pages import ROOT, Block, parse_blocks
from tests.docs.workspace import Workspace
from tests.gateway.client import said
from tests.gateway.stub_engine import StubEngine
from tests.pool.log import records

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PAGE = ROOT / "docs" / "coding-agents.md"
BLOCKS = list(parse_blocks(PAGE))
TRAJECTORY = re.compile(r"127\.0\.0\.1:8100/([\w-]+)/")


@pytest.fixture(scope="module")
def workspace(
    tmp_path_factory: pytest.TempPathFactory,
    kafka: Broker,
    stub: StubEngine,
    tokenizer: Path,
    interpreter: Interpreter,
) -> Iterator[Workspace]:
    folder = tmp_path_factory.mktemp("coding-agents")
    workspace = Workspace(folder, kafka.bootstrap, stub.url, tokenizer, interpreter)
    for block in BLOCKS:
        if block.answers is None:
            workspace.run(block)
    yield workspace
    workspace.close()


def trajectory_uid(block: Block) -> str:
    match = TRAJECTORY.search(block.text)
    assert match is not None, f"{block.location} names no trajectory"
    return match[1]


def skip_without_installer(block: Block) -> None:
    for name in AGENTS:
        if re.search(rf"^{name} ", block.text, re.MULTILINE) and (why := missing_installer(name)):
            pytest.skip(why)


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=trajectory_uid(b)) for b in BLOCKS if b.answers is not None]
)
def test_each_call_is_a_trainable_step_that_continues_the_one_before(
    block: Block, workspace: Workspace, stub: StubEngine
) -> None:
    skip_without_installer(block)
    answers = [said(text)["ids"] for text in json.loads(block.answers or "")]
    stub.reset()
    stub.script([{"ids": ids, "chunk": 16} for ids in answers])
    workspace.run(block)
    assert len(stub.requests()) == len(answers), "the agent makes other calls than the page says"

    uid = trajectory_uid(block)
    found = [r for r in records(workspace.connection, STEPS) if _is_of(r, uid)]
    steps = [record for record in found if isinstance(record, Step)]
    assert [list(unpack_ids(step.response_ids)) for step in steps] == answers
    assert [step.not_trainable for step in steps] == [None] * len(steps)
    prompts = full_prompts(steps)
    for before, after in itertools.pairwise(steps):
        context = prompts[before.step_id] + before.response_ids
        assert prompts[after.step_id].startswith(context), "a new prefix"
    (end,) = (record for record in found if isinstance(record, TrajectoryEnd))
    assert (end.status, end.reward, end.steps) == ("completed", 1.0, len(answers))


def _is_of(record: object, uid: str) -> bool:
    return getattr(record, "trajectory_uid", None) == uid


def test_the_page_names_the_versions_that_are_tested() -> None:
    shown = PAGE.read_text()
    for installation in set(AGENTS.values()):
        for package in installation.packages:
            version = re.split("@|==", package)[-1]
            assert re.search(rf"\b{re.escape(version)}\b", shown), package
