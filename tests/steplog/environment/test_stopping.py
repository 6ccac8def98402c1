"""Waiting, and being stopped: a person sees why nothing happens, and a signal always ends it."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from steplog.environment.backends.direct import Direct
from tests import processes
from tests.gateway.client import eventually
from tests.steplog.environment.environments import ROOT
from tests.steplog.environment.openai_server import running_server

SAYS = """
import asyncio, logging, sys, time
from pathlib import Path
from steplog import Environment

class Mine(Environment):
    async def get_next_item(self):
        return self.index

    async def eval_items(self):
        return range(6)

    async def say(self, rollout):
        question = [{"role": "user", "content": "?"}]
        await rollout.client.chat.completions.create(model="any", messages=question)
        Path("said").touch()

class Hangs(Mine):
    async def collect_trajectory(self, item, rollout):
        await self.say(rollout)
        if item:
            await asyncio.Event().wait()

class Stuck(Mine):
    async def collect_trajectory(self, item, rollout):
        await self.say(rollout)
        await asyncio.Event().wait()

class Blocks(Mine):
    async def collect_trajectory(self, item, rollout):
        await self.say(rollout)
        while True:
            time.sleep(0.01)

class Warns(Mine):
    async def collect_trajectory(self, item, rollout):
        with open("above", "a") as sys.stderr:
            logging.warning("mind the gap")
        sys.stderr = sys.__stderr__

if __name__ == "__main__":
    globals()[sys.argv[1]].cli(sys.argv[2:])
"""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(name: str, *words: str) -> "subprocess.Popen[str]":
            Path("mine.py").write_text(SAYS)
            process = stack.enter_context(
                processes.Popen(
                    [sys.executable, "mine.py", name, *words],
                    env={"PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield begin


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def nobody() -> str:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


@pytest.mark.parametrize("words", [("process", "--url"), ("serve", "--gateway")])
def test_it_says_for_whom_it_waits_and_a_signal_ends_that(
    start: Start, words: tuple[str, str]
) -> None:
    url = nobody()
    process = start("Hangs", *words, url)
    assert process.stderr is not None
    where = url if words[1] == "--url" else f"the gateway at {url}"
    assert process.stderr.readline().startswith(f"Waiting for {where}: no answer (")
    process.send_signal(signal.SIGINT)
    assert ended(process) == (1, f"Stopped while waiting for {where}.\n")


def test_a_url_that_nobody_answers_is_given_up_in_a_sentence(start: Start) -> None:
    url = nobody()
    process = start("Hangs", "process", "--url", url, "--patience-s", "0.1")
    status, err = ended(process)
    assert status == 1 and len(err.splitlines()) == 1
    assert err.startswith(f"No answer from {url} for 0.1 s: no answer (")


@pytest.mark.parametrize("command", ["process", "evaluate"])
def test_what_was_stopped_halfway_says_so_by_its_status(start: Start, command: str) -> None:
    with running_server(lambda _: "x") as url:
        words = ("--url", url, "--group-size", "1", "--drain-s", "0", "--dir", "kept")
        process = start("Hangs", command, *words)
        file = "rollouts" if command == "process" else "samples"
        eventually(Path(f"kept/{command}/{file}.jsonl").exists)
        process.send_signal(signal.SIGTERM)
        status, err = ended(process)
    assert status == 130, err
    assert len(Path(f"kept/{command}/{file}.jsonl").read_text().splitlines()) == 1


def test_an_evaluation_of_which_nothing_was_done_tells_no_numbers(start: Start) -> None:
    with running_server(lambda _: "x") as url:
        process = start("Stuck", "evaluate", "--url", url, "--drain-s", "0")
        eventually(Path("said").exists)
        process.send_signal(signal.SIGTERM)
        status, err = ended(process)
    assert status == 1
    assert err.splitlines()[-1] == "The evaluation was stopped before any item was done."


def test_code_that_blocks_the_loop_is_ended_by_the_third_signal(start: Start) -> None:
    with running_server(lambda _: "x") as url:
        process = start("Blocks", "process", "--url", url)
        eventually(Path("said").exists)
        for _ in range(3):
            eventually(lambda: _pending(process.pid) == 0)
            process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 130


def _pending(pid: int) -> int:
    """Signals that the process has not taken yet; two of a kind would become one."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd")))


def test_warnings_go_where_the_bar_lets_them(start: Start) -> None:
    with running_server(lambda _: "x") as url:
        process = start("Warns", "process", "--url", url, "--groups", "1", "--group-size", "1")
        assert ended(process)[0] == 0
    assert Path("above").read_text() == "WARNING root: mind the gap\n"


def test_while_calls_are_repeated_the_view_says_why() -> None:
    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    async def ask(url: str) -> str:
        direct = Direct(url, None, 5.0, 5.0)
        client = (await direct.name_trajectory("p")).client.with_options(max_retries=0)
        question: Any = [{"role": "user", "content": "?"}]
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="any", messages=question)
        await direct.close()
        return direct.wait_reason

    server = HTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told = asyncio.run(ask(f"http://127.0.0.1:{server.server_port}/v1"))
    server.shutdown()
    server.server_close()
    assert told == "status 503"
