"""The local stack with real processes: trivial commands in the place of vLLM and the services."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servicekit.errors import Fatal
from steplog.processes import StartedProcess, start_time, wait_for
from steplog.stack import commands, stack
from steplog.stack.plan import StackPart, StackPlan
from steplog.stack.settings import StackSettings
from steplog.stack.state import PartState, StackFolder
from tests.conftest import free_port
from tests.steplog.command import STEPLOG, steplog

LIMIT = 60.0
BROKER_LIMIT = 120.0
SLEEP = (sys.executable, "-c", "import time; time.sleep(1000)")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "stack"
    yield directory
    stack.down(directory)


def server(port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1")


def sleeper(name: str, **given: Any) -> StackPart:
    return StackPart(name=name, command=SLEEP, stop_s=5, **given)


def plan(*parts: StackPart) -> StackPlan:
    return StackPlan(parts=parts)


def start(directory: Path, *parts: StackPart) -> StackFolder:
    folder = stack.up(directory, plan(*parts))
    stack.wait_until_ready(folder, lambda name, part: None, LIMIT)
    return folder


def part(folder: StackFolder, name: str) -> PartState:
    state = folder.state
    assert state is not None
    return state.parts[name]


def eventually(condition: Callable[[], bool], limit: float = LIMIT) -> None:
    assert wait_for(condition, limit)


def pid_of(folder: StackFolder, name: str) -> int:
    pid = part(folder, name).pid
    assert pid is not None
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_supervisor(folder: StackFolder) -> None:
    state = folder.state
    assert state is not None
    kill(state.supervisor)
    eventually(lambda: not folder.is_supervised())


def status_of(directory: Path) -> str:
    """What `steplog status` prints, at once: a process of its own could come too late."""
    lines: list[str] = []
    commands.status(StackSettings(dir=directory), lines.append)
    return "\n".join(lines)


KILLED_WHILE_IT_STARTS = """
import os, pathlib, sys
from steplog.processes import spawn

def remember(process):
    pathlib.Path("pid").write_text(str(process.pid))
    os.kill(os.getpid(), 9)

spawn(["touch", "ran"], pathlib.Path("log"), {}, remember)
"""


def test_a_process_that_nobody_wrote_down_does_not_run(tmp_path: Path) -> None:
    starter = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_STARTS])
    assert starter.returncode == -signal.SIGKILL
    eventually(lambda: start_time(int((tmp_path / "pid").read_text())) is None)
    assert not (tmp_path / "ran").exists()


def test_a_pid_that_is_used_again_is_another_process() -> None:
    ours = StartedProcess(os.getpid(), start_time(os.getpid()) or "")
    assert ours.is_running()
    assert not StartedProcess(os.getpid(), ours.born + "0").is_running()


def test_a_killed_part_comes_back(directory: Path) -> None:
    folder = start(directory, sleeper("one"), sleeper("two"))
    first, other = pid_of(folder, "one"), pid_of(folder, "two")
    kill(first)
    eventually(lambda: part(folder, "one").restarts == 1 and part(folder, "one").phase == "ready")
    assert pid_of(folder, "one") != first
    assert (pid_of(folder, "two"), part(folder, "two").restarts) == (other, 0)


@pytest.mark.slow
def test_a_part_that_hangs_is_started_again(directory: Path) -> None:
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}/" for port in ports]
    web, other = (
        StackPart(name=name, command=server(port), ready=url, health=url)
        for name, port, url in zip(("web", "other"), ports, urls, strict=True)
    )
    folder = stack.up(directory, StackPlan(parts=(web, other), hang_s=6))
    stack.wait_until_ready(folder, lambda name, part: None, LIMIT)
    first, second = pid_of(folder, "web"), pid_of(folder, "other")
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: part(folder, "web").phase == "silent")
    assert "silent" in status_of(directory)
    eventually(lambda: part(folder, "web").restarts == 1 and part(folder, "web").phase == "ready")
    assert start_time(first) is None
    assert (part(folder, "web").trouble or "").startswith("did not answer for ")
    assert "did not answer for" in status_of(directory)
    assert (pid_of(folder, "other"), part(folder, "other").restarts) == (second, 0)


@pytest.mark.slow
def test_a_part_that_falls_silent_for_a_moment_goes_on(directory: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    folder = stack.up(
        directory,
        StackPlan(
            parts=(StackPart(name="web", command=server(port), ready=url, health=url),), hang_s=60
        ),
    )
    stack.wait_until_ready(folder, lambda name, part: None, LIMIT)
    pid = pid_of(folder, "web")
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: part(folder, "web").phase == "silent")
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: part(folder, "web").phase == "ready")
    assert (pid_of(folder, "web"), part(folder, "web").restarts) == (pid, 0)


@pytest.mark.slow
def test_one_that_has_never_answered_may_take_its_time(directory: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    silent = StackPart(name="loading", command=SLEEP, ready=url, health=url, stop_s=5)
    port = free_port()
    clock = f"http://127.0.0.1:{port}/"
    other = StackPart(name="web", command=server(port), ready=clock, health=clock)
    folder = stack.up(directory, StackPlan(parts=(silent, other), hang_s=3))
    eventually(lambda: part(folder, "web").phase == "ready")
    os.kill(pid_of(folder, "web"), signal.SIGSTOP)
    eventually(lambda: part(folder, "web").restarts >= 1)
    assert (part(folder, "loading").phase, part(folder, "loading").restarts) == ("starting", 0)


def test_a_part_that_keeps_failing_is_tried_more_and_more_seldom(directory: Path) -> None:
    folder = stack.up(
        directory, plan(StackPart(name="bad", command=("sh", "-c", "echo no; exit 3")))
    )
    eventually(lambda: part(folder, "bad").restarts >= 2)
    assert part(folder, "bad").exit_code == 3
    told = folder.log("supervisor").read_text()
    assert "restarting in 1 s" in told
    eventually(lambda: "restarting in 2 s" in folder.log("supervisor").read_text())
    assert folder.log("bad").read_text().startswith("no\nno\n")


def test_what_has_done_its_work_is_not_started_again(directory: Path) -> None:
    folder = start(
        directory, StackPart(name="job", kind="once", command=("true",)), sleeper("after")
    )
    assert part(folder, "job").phase == "ended"
    assert part(folder, "job").restarts == 0


def test_a_part_waits_for_what_it_needs(directory: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waiting = ("sh", "-c", f"while ! test -e {gate}; do sleep 0.05; done")
    parts = (
        StackPart(name="first", kind="once", command=waiting),
        sleeper("second", needs=("first",)),
    )
    folder = stack.up(directory, plan(*parts))
    eventually(lambda: part(folder, "first").phase == "starting")
    assert part(folder, "second").phase == "waiting"
    gate.touch()
    eventually(lambda: part(folder, "second").phase == "ready")


def test_ready_is_what_a_part_says_of_itself(directory: Path, tmp_path: Path) -> None:
    port = free_port()
    late = (
        "sh",
        "-c",
        'while ! test -e "$0"; do sleep 0.05; done; exec "$@"',
        str(tmp_path / "go"),
    )
    url = f"http://127.0.0.1:{port}/"
    part_ = StackPart(name="web", command=(*late, *server(port)), ready=url)
    folder = stack.up(directory, plan(part_))
    eventually(lambda: part(folder, "web").phase == "starting")
    with pytest.raises(Fatal, match="web is not ready; see"):
        stack.wait_until_ready(folder, lambda name, part: None, 0.5)
    (tmp_path / "go").touch()
    stack.wait_until_ready(folder, lambda name, part: None, LIMIT)


def test_down_ends_the_last_part_first(directory: Path, tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = "trap 'echo {0} >> {1}; exit' TERM; touch {1}-{0}; while :; do sleep 0.05; done"
    names = ("engine", "train", "gateway")
    parts = [StackPart(name=n, command=("sh", "-c", script.format(n, order))) for n in names]
    start(directory, *parts)
    eventually(lambda: all(Path(f"{order}-{name}").exists() for name in names))
    assert sorted(stack.down(directory)) == sorted(names)
    assert order.read_text().split() == ["gateway", "train", "engine"]
    assert stack.down(directory) == []


def test_what_a_part_started_ends_with_it(directory: Path, tmp_path: Path) -> None:
    told = tmp_path / "child"
    script = f"sleep 1000 & echo $! > {told}; wait"
    folder = start(directory, StackPart(name="one", command=("sh", "-c", script)))
    eventually(lambda: told.exists() and bool(told.read_text()))
    child = int(told.read_text())
    kill(pid_of(folder, "one"))
    eventually(lambda: start_time(child) is None)


def test_down_cleans_up_after_a_killed_supervisor(directory: Path) -> None:
    folder = start(directory, sleeper("one"), sleeper("two"))
    pids = [pid_of(folder, name) for name in ("one", "two")]
    kill_supervisor(folder)
    assert all(start_time(pid) for pid in pids), "parts outlive it"
    assert sorted(stack.down(directory)) == ["one", "two"]
    assert not any(start_time(pid) for pid in pids)


def test_a_second_supervisor_takes_over_what_a_killed_one_left(directory: Path) -> None:
    parts = sleeper("one"), sleeper("two")
    folder = start(directory, *parts)
    pids = [pid_of(folder, name) for name in ("one", "two")]
    kill_supervisor(folder)
    start(directory, *parts)
    eventually(lambda: "two is already running" in folder.log("supervisor").read_text())
    assert [pid_of(folder, name) for name in ("one", "two")] == pids
    kill(pids[0])
    eventually(lambda: part(folder, "one").restarts == 1 and part(folder, "one").phase == "ready")


def test_other_settings_are_refused_while_something_runs(directory: Path) -> None:
    folder = start(directory, sleeper("one"))
    before = pid_of(folder, "one")
    start(directory, sleeper("one"))
    assert pid_of(folder, "one") == before, "the same plan again changes nothing"
    with pytest.raises(Fatal, match="other settings\\. Stop it first"):
        stack.up(directory, plan(sleeper("one"), sleeper("two")))
    kill_supervisor(folder)
    with pytest.raises(Fatal, match="other settings\\. Stop it first"):
        stack.up(directory, plan(sleeper("two")))


def settings_file(tmp_path: Path, kafka: str, engine: str) -> None:
    lines = [
        f'bootstrap = "{kafka}"',
        "[stack]",
        "services = []",
        f"engine = [{json.dumps(engine)}]",
    ]
    (tmp_path / "steplog.toml").write_text("\n".join(lines))


@pytest.mark.broker
def test_the_commands(tmp_path: Path, kafka: Any) -> None:
    settings_file(tmp_path, kafka.bootstrap, "env A=b sleep 1000")
    try:
        assert steplog("status").stdout == "Nothing is running in .steplog/stack.\n"
        up = steplog("up")
        assert up.returncode == 0, up.stderr
        assert "The stack is up." in up.stdout
        shown = steplog("status", "--json")
        assert shown.returncode == 0
        parts = {row["part"]: row for row in json.loads(shown.stdout)["parts"]}
        assert parts["engine"]["ready"] and parts["engine"]["restarts"] == 0
        assert parts["topics"]["phase"] == "ended"
        assert Path(parts["topics"]["log"]).read_text().startswith("created")
        assert "engine" in steplog("status").stdout
    finally:
        down = steplog("down")
    assert down.stdout == "Stopped engine.\n"
    assert steplog("status").returncode == 1


@pytest.mark.slow
@pytest.mark.broker
def test_ctrl_c_takes_everything_down(tmp_path: Path, kafka: Any) -> None:
    settings_file(tmp_path, kafka.bootstrap, "sleep 1000")
    process = subprocess.Popen([STEPLOG, "up", "--foreground"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        assert any("The stack is up." in line for line in iter(said.readline, ""))
        folder = StackFolder(tmp_path / ".steplog" / "stack")
        pid = pid_of(folder, "engine")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 130
    assert start_time(pid) is None
    assert not folder.is_supervised()


def test_what_is_wrong_with_a_service_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "steplog.toml").write_text('[stack]\nservices = ["gateway"]\n')
    told = steplog("up")
    assert told.returncode == 2
    assert "tokenizer is missing" in told.stderr
    assert not (tmp_path / ".steplog").exists()


@pytest.mark.broker
@pytest.mark.slow
def test_the_local_broker_is_looked_after(directory: Path, tmp_path: Path) -> None:
    port, began = free_port(), time.time()
    lines = [
        "[stack]",
        "services = []",
        "hang_s = 10",
        "[kafka]",
        f"port = {port}",
        'dir = "broker"',
    ]
    (tmp_path / "steplog.toml").write_text("\n".join(lines))
    try:
        assert steplog("up", "--dir", str(directory)).returncode == 0
        folder = StackFolder(directory)
        kill(pid_of(folder, "kafka"))
        eventually(lambda: part(folder, "kafka").restarts == 1)
        eventually(lambda: part(folder, "kafka").phase == "ready", BROKER_LIMIT)
        assert part(folder, "kafka").since > began
        os.kill(pid_of(folder, "kafka"), signal.SIGSTOP)
        eventually(lambda: part(folder, "kafka").restarts == 2, BROKER_LIMIT)
        eventually(lambda: part(folder, "kafka").phase == "ready", BROKER_LIMIT)
        assert (part(folder, "kafka").trouble or "").startswith("did not answer for ")
    finally:
        assert "kafka" in steplog("down", "--dir", str(directory)).stdout
    assert steplog("kafka", "status").returncode == 1
