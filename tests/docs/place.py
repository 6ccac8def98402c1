"""A folder in which a page's blocks run one after the other, as its reader would run them.

What stands in the pages is the default of every setting, and here each page has ports and topics of its
own. So addresses are replaced in a block's text, and settings are given by variables. The programs on
the PATH are `tests.docs.program` first, which knows what to do with services and with what cannot run.
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
from tests.conftest import free_port
from tests.docs.elsewhere import ELSEWHERE
from tests.docs.interpreter import Interpreter
from tests.docs.pages import ROOT, Block
from tests.docs.state import BIN, KAFKA_TOOLS, PORTS, State, read, write

PROGRAMS = {"steplog", "python", *(words[0] for words in ELSEWHERE), *KAFKA_TOOLS}
SEEN = ["examples", "deploy", "docker-compose.yml", ".env.example", "pyproject.toml"]
"""What of the checkout a reader has before him."""


class Place:
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
        topics.create(Connection(bootstrap=bootstrap, topic_prefix=state.prefix))
        self._furnish()

    def _furnish(self) -> None:
        self.work.mkdir()
        self._bin.mkdir()
        for name in SEEN:
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

    def keep(self, block: Block) -> None:
        """As the file that it is."""
        if block.file is not None:
            (self.work / block.file).write_text(self._placed(block.text))

    def run(self, block: Block) -> None:
        self.keep(block)
        self._start_what_is_taken_for_granted(block)
        text = self._placed(block.commands)
        if block.language == "python":
            output = self.work.parent / "output"
            status = self._interpreter.run(text, self.work, self._environ(), output)
            assert status == 0, f"{block.where} gives {status}:\n{output.read_text()}"
        else:
            self._execute(text, block)

    def _start_what_is_taken_for_granted(self, block: Block) -> None:
        """A page for agents need not begin with a gateway: its reader has one."""
        state = read(self._state)
        wanted = {
            "gateway": f"--engines http://{state.engine} --tokenizer {state.tokenizer}",
            "reward": f"--tokenizer {state.tokenizer}",
        }
        for service, options in wanted.items():
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
        assert done.returncode == 0, f"{block.where} gives {done.returncode}:\n{done.stdout}"

    def _environ(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("STEPLOG_")}
        return {
            **inherited,
            **read(self._state).variables(),
            "PATH": f"{self._bin}:{BIN}:{os.environ['PATH']}",
            "DOCS_STATE": str(self._state),
        }

    def _placed(self, text: str) -> str:
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
