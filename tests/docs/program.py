"""Stand-ins for the programs that a page's commands call, such as `steplog`.

A service is started in the background and runs until the page ends or starts it again; pages show it
without an ampersand, because a reader has a terminal for each. Commands in `unrunnable` are checked
instead of run. Everything else runs the real program.
"""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.agents import AGENTS, find_program
from tests.docs.state import BIN, KAFKA_TOOLS, PORTS, State, read, write
from tests.docs.unrunnable import find_check, settings_of

START_LIMIT_S = 240.0
POLL_S = 0.05


def main() -> None:
    words, file = sys.argv[1:], Path(os.environ["DOCS_STATE"])
    state = read(file)
    os.environ.update(state.variables())
    check = find_check(words)
    if "--help" in words:
        exec_program(words)
    elif check is not None:
        check(words)
    elif words[0] in AGENTS:
        run_agent(words, file.parent / "home")
    elif words[0] in KAFKA_TOOLS:
        from steplog.kafka import software

        java = [
            software.java(),
            "-Xmx128m",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            f"{software.jars()}/*",
        ]
        os.execvp(java[0], [*java, KAFKA_TOOLS[words[0]], *words[1:]])
    elif words[:2] == ["steplog", "kafka"] and words[2] in ("start", "stop"):
        subprocess.run([BIN / "steplog", *words[1:]], check=True)
        state.own_broker = words[2] == "start"
        write(file, state)
    elif words[0] == "steplog" and words[1] in PORTS:
        start_service(words, state)
        write(file, state)
    else:
        exec_program(words)


def run_agent(words: Sequence[str], home: Path) -> None:
    """Its settings and sessions are the page's, not those of whoever runs the tests."""
    program = find_program(words[0])
    home.mkdir(exist_ok=True)
    os.environ["HOME"] = str(home)
    os.execv(program, [*words])


def exec_program(words: Sequence[str]) -> None:
    program = str(BIN / words[0])
    os.execv(program, [program, *words[1:]])


def start_service(words: Sequence[str], state: State) -> None:
    name = words[1]
    if name in state.running:
        with suppress(ProcessLookupError):
            os.killpg(state.running.pop(name), 9)
    settings = settings_of(words, os.environ)
    log = Path(f"{name}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [BIN / "steplog", *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    state.running[name] = process.pid
    url = f"http://127.0.0.1:{settings.port}/ready"
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(POLL_S)
    process.kill()
    raise SystemExit(f"{' '.join(words)} did not become ready:\n{log.read_text()[-3000:]}")
