"""The folder in which a page's blocks run one after the other, as a reader would run them.

Pages use the default ports and topics, but each test has its own. So addresses in a block's text are
replaced, and settings are passed as variables. The PATH begins with stand-ins
(`tests.docs.program`) that start services in the background and check commands that cannot run.
"""

import os
import re
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

from pool import topics
from pool.connection import Connection
from pool.topics import TOPICS
from tests import agents
from tests.agents import AGENTS
from tests.conftest import free_port
from tests.docs.interpreter import Interpreter
from tests.docs.pages import ROOT, Block
from tests.docs.state import BIN, KAFKA_TOOLS, PORTS, State, read, write
from tests.docs.unrunnable import UNRUNNABLE

PROGRAMS = {"steplog", "python", *(words[0] for words in UNRUNNABLE), *KAFKA_TOOLS, *AGENTS}
FRAMEWORK = re.compile(r"^(?:from|import) (?:agents|langchain|litellm|pydantic_ai)", re.MULTILINE)
"""Begins a block that needs the interpreter of the frameworks."""
CHECKOUT_FILES = ["examples", "deploy", "docker-compose.yml", ".env.example", "pyproject.toml"]
"""Parts of the checkout that a page may refer to."""


class Workspace:
    def __init__(
        self,
        folder: Path,
        bootstrap: str,
        engine: str,
        tokenizer: Path,
        interpreter: Interpreter,
    ) -> None:
        self._interpreter = interpreter
        name = f"docs-{uuid.uuid4().hex[:8]}"
        self.work, self._bin, self._state = folder / "work", folder / "bin", folder / "state.json"
        ports = {service: free_port() for service in PORTS}
        state = State(
            bootstrap, f"{name}.", name, free_port(), engine.removeprefix("http://"),
            str(tokenizer), ports,
        )  # fmt: skip
        write(self._state, state)
        self.connection = Connection(bootstrap=bootstrap, topic_prefix=state.prefix)
        topics.create(self.connection)
        self._create_folders()

    def _create_folders(self) -> None:
        self.work.mkdir()
        self._bin.mkdir()
        for name in CHECKOUT_FILES:
            (self.work / name).symlink_to(ROOT / name)
        (self.work / ".venv").mkdir()
        (self.work / ".venv" / "bin").symlink_to(self._bin)
        for name in PROGRAMS:
            script = (
                f'#!/bin/sh\nexec {sys.executable} -P -c "import sys; sys.path[:0] = [{str(ROOT)!r}]; '
                f'from tests.docs.program import main; main()" {name} "$@"\n'
            )
            (self._bin / name).write_text(script)
            (self._bin / name).chmod(0o755)

    def save(self, block: Block) -> None:
        """Writes the file that the block defines, if any."""
        if block.file is not None:
            (self.work / block.file).write_text(self._substitute(block.text))

    def run(self, block: Block) -> None:
        self.save(block)
        self._start_assumed_services(block)
        text = self._substitute(block.commands)
        if block.language == "python" and FRAMEWORK.search(text):
            (self.work / "block.py").write_text(text)
            self._execute(f"{agents.find_python()} block.py", block)
        elif block.language == "python":
            output = self.work.parent / "output"
            status = self._interpreter.run(text, self.work, self._environ(), output)
            assert status == 0, f"{block.location} exits with {status}:\n{output.read_text()}"
        else:
            self._execute(text, block)

    def _start_assumed_services(self, block: Block) -> None:
        """Starts services that the block calls but the page does not start, such as a gateway."""
        state = read(self._state)
        options_by_service = {
            "gateway": f"--engines http://{state.engine} --tokenizer {state.tokenizer}",
            "reward": f"--tokenizer {state.tokenizer}",
        }
        for service, options in options_by_service.items():
            is_used = f"127.0.0.1:{PORTS[service]}" in block.text
            if is_used and service not in state.running and f"steplog {service}" not in block.text:
                self._execute(f"steplog {service} {options}", block)

    def _execute(self, text: str, block: Block) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.work,
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, (
            f"{block.location} exits with {done.returncode}:\n{done.stdout}"
        )

    def _environ(self) -> dict[str, str]:
        foreign = ("STEPLOG_", *agents.VARIABLES)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return {
            **inherited,
            **read(self._state).variables(),
            "PATH": f"{self._bin}:{BIN}:{os.environ['PATH']}",
            "DOCS_STATE": str(self._state),
        }

    def _substitute(self, text: str) -> str:
        state = read(self._state)
        for service, usual in PORTS.items():
            text = text.replace(f"127.0.0.1:{usual}", f"127.0.0.1:{state.ports[service]}")
        text = text.replace("127.0.0.1:8000", state.engine)
        text = text.replace("127.0.0.1:9092", state.variables()["STEPLOG_BOOTSTRAP"])
        text = re.sub(r"\bMODEL(_FOLDER)?\b", state.tokenizer, text)
        text = re.sub(rf"\bsteplog\.({'|'.join(TOPICS)})\b", rf"{state.prefix}\1", text)
        return re.sub(r"\bsteplog-reward\b", state.group, text)

    def close(self) -> None:
        state = read(self._state)
        for pid in state.running.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, 9)
        if state.own_broker:
            subprocess.run([BIN / "steplog", "kafka", "stop"], cwd=self.work, check=True)
