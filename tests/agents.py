"""Real agents that tests run unchanged: coding agents from npm, and Python agents and frameworks.

Each is installed once per user, in a pinned version, by npm or uv as they are set up on the machine. A
file marks a complete installation; what an interrupted one left behind is removed."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

INSTALL_LIMIT_S = 240
COMPLETE = "complete"
UV = Path(sys.executable).with_name("uv")


class Installation(NamedTuple):
    """Packages that are installed together, into a folder of this name."""

    name: str
    packages: tuple[str, ...]
    from_npm: bool = False

    @property
    def programs(self) -> str:
        return "node_modules/.bin" if self.from_npm else "bin"


FRAMEWORKS = Installation(
    "frameworks-1",
    (
        "langchain-openai==1.7.3",
        "litellm==1.83.0",
        "mini-swe-agent==2.4.6",
        "openai-agents==0.24.0",
        "pydantic-ai-slim[openai]==2.66.0",
    ),
)
AGENTS: Mapping[str, Installation] = {
    "claude": Installation("claude-2.1.325", ("@anthropic-ai/claude-code@2.1.325",), from_npm=True),
    "codex": Installation("codex-0.166.0", ("@openai/codex@0.166.0",), from_npm=True),
    "opencode": Installation("opencode-1.18.33", ("opencode-ai@1.18.33",), from_npm=True),
    "qwen": Installation("qwen-0.24.4", ("@qwen-code/qwen-code@0.24.4",), from_npm=True),
    "mini": FRAMEWORKS,
    "aider": Installation("aider-0.86.2", ("aider-chat==0.86.2",)),
}
"""By the name of their program."""
VARIABLES = ("ANTHROPIC_", "OPENAI_", "CLAUDE", "CODEX_", "OPENCODE_", "QWEN_", "MSWEA_", "AIDER_")
"""Prefixes of the agents' environment variables, of which a test passes on none."""


def find_program(name: str) -> Path:
    """The program of an agent, which is installed if it is not yet."""
    return _installed(AGENTS[name]) / AGENTS[name].programs / name


def find_python() -> Path:
    """The interpreter that has the frameworks."""
    return _installed(FRAMEWORKS) / FRAMEWORKS.programs / "python"


def missing_installer(name: str) -> str | None:
    """What must be installed before this agent can be; None if nothing must."""
    is_missing = AGENTS[name].from_npm and shutil.which("npm") is None
    return "npm is not installed" if is_missing else None


def _installed(installation: Installation) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steplog" / "agents"
    folder = cache / installation.name
    if not (folder / COMPLETE).exists():
        with _alone(cache):
            if not (folder / COMPLETE).exists():
                _install(installation, folder)
    return folder


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(installation: Installation, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if installation.from_npm:
        folder.mkdir()
        _run(
            "npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *installation.packages
        )
    else:
        python = folder / installation.programs / "python"
        _run(UV, "venv", "--python", sys.executable, folder)
        _run(UV, "pip", "install", "--python", python, *installation.packages)
    (folder / COMPLETE).touch()


def _run(*command: str | Path) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{command} exits with {done.returncode}:\n{done.stderr[-3000:]}"
