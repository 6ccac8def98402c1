"""Commands that the operating system starts, as users do: other tests fork them (tests/processes.py).

The pages of the documentation start kafka, topics, gateway, reward, cat, lag, key and monitor in this
way too, tests/telemetry `train`, and tests/steplog/test_stack.py the parts of a stack.
"""

import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import STEPS
from tests.conftest import free_port
from tests.pool.log import write
from tests.reward.running import answered
from tests.steplog.command import STEPLOG, reaching
from tests.tiny_model import build_tokenizer

pytestmark = [pytest.mark.broker, pytest.mark.slow]
LIMIT_S = 120.0
REWARDS = """
def score(trajectory):
    return 1.0
"""


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=1)
    return connection


def run_by_exec(*words: str) -> str:
    done = subprocess.run([STEPLOG, *words], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("service", ["gateway", "reward", "atropos", "monitor"])
def test_a_service_starts_and_ends(log: Connection, tmp_path: Path, service: str) -> None:
    port = free_port()
    (tmp_path / "rewards.py").write_text(REWARDS)
    tokenizer = ["--tokenizer", str(build_tokenizer(tmp_path / "tokenizer"))]
    options = {
        "gateway": [*tokenizer, "--engines", f"http://127.0.0.1:{free_port()}"],
        "reward": [*tokenizer, "--function", f"{tmp_path / 'rewards.py'}:score"],
    }.get(service, [])
    command = [STEPLOG, service, *reaching(log), "--port", str(port), *options]
    with subprocess.Popen(command) as process:
        try:
            wait_for_answer(process, f"http://127.0.0.1:{port}/metrics")
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) in (0, 143)
        finally:
            process.kill()


def wait_for_answer(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.05)
    raise AssertionError(f"nobody answers at {url}")


def test_the_log_is_read_again(log: Connection, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    write(log, STEPS, [*answered("t", "yes"), *answered("u", "no")])
    function = ["--function", f"{rewards}:score"]
    for tag in ("first", "second"):
        run_by_exec("replay", "rescore", *reaching(log), "--into", tag, *function)
    sets = ["--rewards", "first", "--with", "second"]
    assert run_by_exec("replay", "diff", *reaching(log), *sets)
    assert "t" in run_by_exec("replay", "lineage", *reaching(log), "--trajectory", "t")
    into = tmp_path / "exported"
    run_by_exec("replay", "export", *reaching(log), "--into", str(into), "--topic", "steps")
    imported = run_by_exec("replay", "import", *reaching(log), "--dry-run", str(into))
    assert imported == "2 Steps can be imported\n"
    copy = ["--into-prefix", f"copy-{log.topic_prefix}", "--trajectory", "t"]
    run_by_exec("replay", "delete", *reaching(log), *copy)
    assert '"u"' in run_by_exec("cat", "steps", *reaching(log))


def test_a_run_that_trained_nothing_cannot_be_exported_or_repeated(
    log: Connection, tmp_path: Path
) -> None:
    folders = ["--checkpoints", str(tmp_path), "--into", str(tmp_path / "into")]
    for words in (["export"], ["replay", "step", *reaching(log), "--version", "1"]):
        done = subprocess.run(
            [STEPLOG, *words, *folders], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
