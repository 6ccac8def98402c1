"""Code that nobody trusts: what it cannot do, and what its tests come to."""

import asyncio
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reward.functions import confined, sandbox
from reward.functions.sandbox import Finished, Sandbox, SandboxUnavailable, open_sandbox
from reward.functions.unit_tests import unit_tests
from steplog.rewards import Reward, RewardFailed, RewardUnavailable
from tests.reward.trajectories import make_trajectory

in_every_way = pytest.mark.parametrize("network", ["", "namespace", "seccomp"])

Run = Callable[..., Any]

SHORT_S, LONG_S = (2.0, 10.0), 60.0
"""What is to run out of time must have begun before, which a busy machine may be too slow for at first;
and what ended it must not take for ever."""

probed = cache(sandbox.probe)


@pytest.fixture(autouse=True)
def probe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "probe", probed)


@cache
def opened(network: str = "") -> Sandbox:
    try:
        return open_sandbox(10.0, 256, network)
    except SandboxUnavailable as error:
        if network == "namespace":  # containers often forbid it; the other way must work
            pytest.skip(str(error))
        raise


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a text of Python."""

    async def start(
        code: str, given: str = "", limit_s: float = 10.0, network: str = ""
    ) -> Finished:
        program = tmp_path / "program.py"
        program.write_text(code)
        return await replace(opened(network), limit_s=limit_s).run(program, given.encode())

    return start


def attempt(*lines: str, before: str = "") -> str:
    """A program that reports what each line raises, or that it works."""
    return f"""
import ctypes, os, socket, subprocess, sys, threading
{before}
for line in {list(lines)!r}:
    try:
        exec(line)
    except BaseException as error:
        print(type(error).__name__, flush=True)
    else:
        print("worked", flush=True)
"""


def outside(code: str, given: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, input=given, capture_output=True, text=True).stdout


def is_there(path: str) -> bool:
    return Path(path).exists()


REACH = attempt(
    "socket.create_connection(('127.0.0.1', port), timeout=5)",
    "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.sendto(b'x', ('127.0.0.1', port))",
    before="port = int(sys.stdin.readline())",
)


@in_every_way
async def test_there_is_no_network(run: Run, network: str) -> None:
    """The same program reaches the same port outside."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert outside(REACH, port) == "worked\nworked\n"
        finished = await run(REACH, port, network=network)
    kind = "OSError" if network == "namespace" else "PermissionError"
    assert finished.report.decode().split() == [kind, kind]


@in_every_way
async def test_what_could_make_sockets_otherwise_is_not_there(run: Run, network: str) -> None:
    code = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
calls = [425]  # io_uring_setup
if platform.machine() == "x86_64":
    calls.append(0x40000000 + 41)  # socket, for pointers of 32 bits
for call in calls:
    print(libc.syscall(call, 2, 1, 0), ctypes.get_errno())
"""
    finished = await run(code, network=network)
    assert set(finished.report.decode().splitlines()) == {"-1 38"}


async def test_sockets_of_this_machine_are_out_of_reach(run: Run) -> None:
    """A container runtime listens on one. In a namespace alone it could be reached by its name."""
    finished = await run(attempt("socket.socket(socket.AF_UNIX)", "socket.socketpair()"))
    assert finished.report.decode().split() == ["PermissionError", "worked"]


async def test_memory_is_limited_and_none_outlives_it(run: Run) -> None:
    shared = "if ctypes.CDLL(None).shmget(0, 4096, 0o1600) < 0: raise OSError"
    finished = await run(attempt("x = bytearray(1 << 30)", shared))
    assert finished.report == b"MemoryError\nOSError\n"


async def test_no_process_can_be_started_but_threads_can(run: Run) -> None:
    finished = await run(
        attempt(
            "os.fork()",
            "subprocess.run(['/bin/true'])",
            "os.posix_spawn('/bin/true', ['true'], {})",
            "os.system('true') and exec('raise OSError')",
            "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()",
        )
    )
    expected = ["PermissionError"] * 3 + ["OSError", "thread", "worked"]
    assert finished.report.decode().split() == expected


BOMB = """
import os
print(os.getpid(), flush=True)
while True:
    try: os.fork()
    except OSError: pass
"""


async def test_a_fork_bomb_leaves_nothing(run: Run) -> None:
    before = time.monotonic()
    for limit_s in SHORT_S:
        finished = await run(BOMB, limit_s=limit_s)
        if finished.report:
            break
    assert finished.status is None and time.monotonic() - before < LONG_S
    assert not is_there(f"/proc/{int(finished.report)}")


async def test_its_time_is_limited(run: Run) -> None:
    before = time.monotonic()
    for limit_s in SHORT_S:
        finished = await run("print('begun', flush=True)\nwhile True: pass", limit_s=limit_s)
        if finished.report:
            break
    assert finished == Finished(b"begun\n", "", None)
    assert time.monotonic() - before < LONG_S


async def test_a_cancelled_run_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time; time.sleep(60)")
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    original = asyncio.create_subprocess_exec

    async def noted(*arguments: Any, **settings: Any) -> asyncio.subprocess.Process:
        process = await original(*arguments, **settings)
        started.set_result(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    task = asyncio.create_task(opened().run(program, b""))
    pid = await started
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_there(f"/proc/{pid}")


@pytest.mark.parametrize("where", ["sys.stderr", "sys.stdout"])
async def test_a_flood_of_output_is_bounded(run: Run, where: str) -> None:
    code = f"import sys\nwhile True: print('x' * 10_000, file={where})"
    finished = await run(code)
    assert len(finished.tail) <= sandbox.TAIL_BYTES
    assert len(finished.report) <= sandbox.MAX_REPORT + (1 << 17)


async def test_it_writes_only_into_its_own_folder(run: Run, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    finished = await run(
        attempt(
            "open('own', 'w').write('x'); os.rename('own', 'other'); os.mkdir('folder')",
            "open(victim, 'w')",
            "open(victim, 'a')",
            "os.truncate(victim, 0)",
            "os.remove(victim)",
            "os.rename(victim, 'mine')",
            "os.link(victim, 'mine')",
            "os.chmod(victim, 0)",
            "os.utime(victim, (0, 0))",
            "os.mkdir(victim + '2')",
            "os.setxattr(victim, 'user.x', b'x')",
            before="victim = sys.stdin.readline()",
        ),
        str(victim),
    )
    told = finished.report.decode().split()
    assert told[0] == "worked" and set(told[1:]) <= {"PermissionError", "OSError"}, told
    assert victim.read_text() == "as it was" and not victim.with_name("victim2").exists()


@in_every_way
async def test_it_reads_neither_files_nor_secrets(
    run: Run, network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    (tmp_path / "secret").write_text("secret")
    finished = await run(
        attempt(
            "open(secret).read()",
            f"open('/proc/{os.getpid()}/environ').read()",
            "open('/etc/passwd').read()",
            "os.environ['API_KEY']",
            "import json, sqlite3, decimal",
            "open('/dev/urandom', 'rb').read(1)",
            before="secret = sys.stdin.readline()",
        ),
        str(tmp_path / "secret"),
        network=network,
    )
    refused = ["PermissionError"] * 3
    assert finished.report.decode().split() == [*refused, "KeyError", "worked", "worked"]


@in_every_way
async def test_other_processes_are_out_of_reach(run: Run, network: str) -> None:
    finished = await run(
        attempt(
            "os.kill(worker, 0)",
            "os.kill(-1, 0)",
            "resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, 3))",
            "os.sched_setaffinity(worker, {0})",
            "os.setpriority(os.PRIO_PROCESS, worker, 19)",
            "signal.pidfd_send_signal(os.pidfd_open(worker), 0)",
            "os.kill(os.getpid(), 0)",
            before=f"import resource, signal; worker = {os.getpid()}",
        ),
        network=network,
    )
    assert finished.report.decode().split() == ["PermissionError"] * 6 + ["worked"]


async def test_folders_are_fresh_and_go_away(run: Run) -> None:
    """Even those that the code locked."""
    code = """
import os
print(os.getcwd(), os.listdir())
os.makedirs("a/b"); os.mkdir("a/b/locked", 0); os.symlink("/", "a/root")
"""
    told = [(await run(code)).report.decode().split() for _ in range(2)]
    assert [listed for _, listed in told] == ["[]", "[]"]
    assert told[0][0] != told[1][0]
    assert not any(is_there(folder) for folder, _ in told)


async def test_it_may_leave_its_input_unread(run: Run) -> None:
    finished = await run("print('done')", "x" * 10_000_000)
    assert finished == Finished(b"done\n", "", 0)


async def test_a_sandbox_that_does_not_start_says_nothing_of_the_code(tmp_path: Path) -> None:
    with pytest.raises(RewardUnavailable, match="did not start"):
        await opened().run(tmp_path / "missing.py", b"")


def test_where_it_cannot_be_done_it_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def probe(_: Sandbox) -> str:
        return "Operation not permitted"

    monkeypatch.setattr(sandbox, "probe", probe)
    with pytest.raises(SandboxUnavailable, match="neither a network namespace nor a seccomp"):
        unit_tests()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailable, match="only on Linux on x86_64 or aarch64"):
        unit_tests()


def test_a_sandbox_that_reaches_the_network_is_none() -> None:
    """The probe itself: neither way is taken."""
    error = sandbox.probe(Sandbox(10, 256, namespace=False, seccomp=False))
    assert error == "the network could be reached"


def test_without_landlock_root_is_refused_and_others_are_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(confined, "landlock_version", lambda: 0)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SandboxUnavailable, match="as root"):
        open_sandbox(10, 256)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not open_sandbox(10, 256, "seccomp").landlock
    assert "no Landlock" in caplog.text


def test_both_machines_refuse_the_same() -> None:
    """aarch64 never had the calls that newer ones replace."""
    old = {"fork", "vfork", "chmod", "chown", "lchown", "utime", "utimes", "futimesat"}
    assert confined.X86_64.keys() - confined.AARCH64.keys() == old
    assert not confined.AARCH64.keys() - confined.X86_64.keys()
    for calls in confined.CALLS.values():
        assert len(set(calls.values())) == len(calls)
        assert calls.keys() >= {*confined.ON_ITSELF, *confined.ABSENT}


# Tests of solutions

ADD = "Here you are:\n```python\ndef add(a, b):\n    return a + b\n```\n"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(1, 1) == 3"]
CASES = """
import unittest
from solution import add
class Adds(unittest.TestCase):
    def test_ones(self): self.assertEqual(add(1, 1), 2)
    def test_wrong(self): self.assertEqual(add(1, 1), 3)
"""
FUNCTIONS = "def test_a(): assert add(1, 2) == 3\ndef test_b(): assert add(1, 2) == 4"
ECHO = "```python\nfor _ in range(int(input())):\n    print(input()[::-1])\n```"
BYTES = "```python\nimport sys\nsys.stdout.buffer.write(sys.stdin.buffer.read().upper())\n```"
DESCRIPTOR = "```python\nprint(sum(map(int, open(0))))\nraise SystemExit(0)\n```"
DATACLASS = """```python
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class P:
    x: int
```"""


async def scored(response: str, tests: Any, **settings: Any) -> Reward:
    reward = await unit_tests(**settings)(make_trajectory(response, tests=tests))
    assert isinstance(reward, Reward)
    return reward


@pytest.mark.parametrize(
    ("response", "tests", "passed", "failed"),
    [
        (ADD, ADD_TESTS, 2, 1),
        (ADD, "assert add(1, 2) == 3\nassert add(1, 1) == 2", 1, 0),
        (ADD, FUNCTIONS, 1, 1),
        (ADD, CASES, 1, 1),
        (ADD, ["assert add(1, 2) == 3", FUNCTIONS], 2, 1),
        (ADD + "or\n```python\ndef add(a, b): return a\n```", ADD_TESTS[:1], 0, 1),
        ("def add(a, b): return a + b", ADD_TESTS, 2, 1),
        ("```python\ndef add(a, b:\n```", ADD_TESTS, 0, 3),
        ("I cannot.", ADD_TESTS, 0, 3),
        (DATACLASS, "assert P(1).x == 1", 1, 0),
        (ECHO, {"input": "2\nab\ncd\n", "output": "ba\ndc"}, 1, 0),
        (ECHO, {"inputs": ["1\nab", "1\nab", "x"], "outputs": ["ba \n", "ab", ""]}, 1, 2),
        (BYTES, [{"input": "é a", "output": "é A"}], 1, 0),
        (DESCRIPTOR, [{"input": "1\n2", "output": "3"}, {"input": "4", "output": "4"}], 2, 0),
        # Ways to look as if all was passed.
        ("import os; os._exit(0)", ADD_TESTS, 0, 3),
        ("raise SystemExit(0)", ADD_TESTS, 0, 3),
        ("import sys\nfor n in range(9): print('word', 'test', 'ok')", ADD_TESTS, 0, 3),
        ("def test_mine(): pass", "assert False", 0, 1),
        ("x = []\ndef f():\n    x.append(' ' * (1 << 30))", ["f()", "pass"], 1, 1),
    ],
)
async def test_solutions(response: str, tests: Any, passed: int, failed: int) -> None:
    reward = await scored(response, tests)
    assert (reward.details["passed"], reward.details["failed"]) == (passed, failed), reward
    assert reward.value == passed / (passed + failed)


@pytest.mark.parametrize(
    ("tests", "failed"),
    [(["f(0)", "f(1)", "f(0)"], 2), ("def test_a(): f(0)\ndef test_b(): f(1)", 1)],
)
async def test_what_runs_out_of_time_keeps_what_was_passed_before(tests: Any, failed: int) -> None:
    for limit_s in SHORT_S:
        reward = await scored("def f(n):\n    while n: pass", tests, limit_s=limit_s)
        if reward.details["passed"]:
            break
    assert (reward.details["passed"], reward.details["failed"]) == (1, failed), reward
    assert reward.details["ended"] == "the time limit was reached"


async def test_all_or_nothing() -> None:
    assert (await scored(ADD, ADD_TESTS, all_or_nothing=True)).value == 0.0
    assert (await scored(ADD, ADD_TESTS[:2], all_or_nothing=True)).value == 1.0


async def test_the_record_says_what_went_wrong() -> None:
    code = "import os\nprint('so far', flush=True)\ndef f(): os.abort()"
    details = (await scored(code, ["1 / 0", "f()", "pass"])).details
    assert details["errors"] == ["ZeroDivisionError: division by zero"]
    assert details["output"].startswith("so far")
    assert details["ended"] == "the process exited with status -6"
    assert "ended" not in (await scored(ADD, ADD_TESTS)).details


async def test_without_tests_there_is_no_opinion_and_bad_ones_are_a_failure() -> None:
    score: Any = unit_tests()
    assert await score(make_trajectory(ADD)) is None
    for wrong in (3, [], [3], [{"input": "x"}], {"in": 1}):
        with pytest.raises(RewardFailed, match="has no tests"):
            await score(make_trajectory(ADD, tests=wrong))


async def test_many_run_at_once_but_not_more_than_are_let(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0
    original = Sandbox.run

    async def counted(self: Sandbox, program: Path, given: bytes) -> Finished:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await original(self, program, given)
        finally:
            running -= 1

    monkeypatch.setattr(Sandbox, "run", counted)
    score: Any = unit_tests(at_a_time=2)
    rewards = await asyncio.gather(
        *(score(make_trajectory(ADD, tests=ADD_TESTS[:2])) for _ in range(6))
    )
    assert [reward.value for reward in rewards] == [1.0] * 6
    assert most == 2


def test_it_works_off_the_main_thread() -> None:
    values: list[Any] = []

    def work() -> None:
        values.append(asyncio.run(scored(ADD, ADD_TESTS[:2])).value)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert values == [1.0]
