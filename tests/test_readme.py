"""The commands of the README do what it says, on a clean machine's defaults but for the port."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.broker


def shell_blocks() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [
        [line.partition("#")[0].strip() for line in block.strip().splitlines()] for block in blocks
    ]


@pytest.fixture
def environment() -> dict[str, str]:
    port = str(free_port())
    ours = {"STEPLOG_KAFKA_PORT": port, "STEPLOG_BOOTSTRAP": f"127.0.0.1:{port}"}
    return {**os.environ, **ours}


@pytest.fixture
def somewhere(tmp_path: Path, environment: dict[str, str]) -> Iterator[Path]:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield tmp_path
    subprocess.run([BIN / "steplog", "kafka", "stop"], cwd=tmp_path, env=environment, check=True)


def test_the_start_of_the_readme_works_as_it_stands(
    somewhere: Path, environment: dict[str, str]
) -> None:
    setup, *commands = shell_blocks()[0]
    assert setup == "make setup", "what runs these tests"
    said = {}
    for command in commands:
        real = command.replace(".venv/bin", str(BIN))
        done = subprocess.run(
            real.split(), cwd=somewhere, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        said[command.removeprefix(".venv/bin/")] = done.stdout
    lines = [json.loads(line) for line in said["steplog cat steps"].splitlines()]
    assert [line["type"] for line in lines] == ["Step", "Step", "TrajectoryEnd"]
    assert lines[1]["prompt_ids"] == [*range(100, 120), 7, 8, 9, 200, 201], "the prompt in full"


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command in shell_blocks()[1]]
    assert "test" in targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
