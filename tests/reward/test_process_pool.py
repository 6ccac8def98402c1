"""Plain functions in processes of their own: what hangs or dies is found, and harms no other."""

import multiprocessing
import os
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from reward.scoring.loading import load_all
from reward.scoring.process_pool import ProcessPool
from reward.scoring.results import FunctionResult
from servicekit.errors import Fatal
from tests.pool.records import end, step, trajectory_of

LIMIT_S = 60.0
UNASKED = FunctionResult("nobody", "", 0.0)


@pytest.fixture(scope="module", autouse=True)
def own_fork_server() -> Iterator[None]:
    """Other tests of this process use multiprocessing's fork server with other imports preloaded."""
    server: Any = forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "ensure_running",
            "get_inherited_fds",
            "connect_to_new_process",
            "set_forkserver_preload",
        ):
            patch.setattr(forkserver, name, getattr(server, name))
        yield
    server._stop()


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(
        textwrap.dedent(
            f"""
            import os, time
            from pathlib import Path
            from steplog import Reward, RewardFailed, RewardUnavailable

            def score(trajectory):
                uid = trajectory.uid
                if uid.startswith("die"):
                    os._exit(9)
                if uid.startswith("memory"):
                    raise MemoryError
                if uid.startswith("exit"):
                    raise SystemExit(3)
                if uid.startswith("away"):
                    raise RewardUnavailable("no judge")
                if uid.startswith("never"):
                    raise RewardFailed("no use")
                if uid.startswith("odd"):
                    raise ValueError("half a \\ud83d")
                if uid.startswith("hang"):
                    Path({str(tmp_path)!r}, "hangs").write_text(str(os.getpid()))
                    while True:
                        pass
                if uid.startswith("threads"):
                    return Reward(float(len(list(Path("/proc/self/task").iterdir()))))
                if uid.startswith("files"):
                    files = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
                    return Reward(1.0, details={{"files": files}})
                if uid.startswith("slow"):
                    time.sleep(0.2)
                return Reward(1.0, details={{"process": os.getpid()}})
            """
        )
    )
    return file


class Asked:
    """Gathers answers by trajectory."""

    def __init__(self, isolated: Callable[..., ProcessPool]) -> None:
        self.uids: list[str] = []
        self.answers: dict[str, FunctionResult] = {}
        self.unwanted: set[str] = set()
        self.isolated = isolated(self._done, lambda number: self.uids[number] not in self.unwanted)

    def ask(self, *uids: str) -> "Asked":
        for uid in uids:
            self.uids.append(uid)
            trajectory = trajectory_of(step(f"{uid}-0", uid), end(uid, steps=1))
            self.isolated.submit(len(self.uids) - 1, trajectory)
        return self

    def _done(self, number: int, results: list[FunctionResult]) -> None:
        uid = self.uids[number]
        assert uid not in self.answers, "it was answered twice"
        [self.answers[uid]] = results or [UNASKED]

    def wait(self) -> dict[str, FunctionResult]:
        deadline = time.monotonic() + LIMIT_S
        while len(self.answers) < len(self.uids):
            assert time.monotonic() < deadline, set(self.uids) - set(self.answers)
            assert self.isolated.error is None
            time.sleep(0.005)
        return self.answers


@pytest.fixture
def asking(rewards: Path) -> Iterator[Callable[..., Asked]]:
    made: list[Asked] = []

    def make(limits: str = "timeout_s=30&attempts=2", processes: int = 1) -> Asked:
        specs = [f"{rewards}:score?{limits}"]
        functions = load_all(specs)
        made.append(Asked(lambda *told: ProcessPool(specs, functions, None, processes, *told)))
        return made[-1]

    yield make
    for asked in made:
        asked.isolated.close()


def scoring_processes() -> list[psutil.Process]:
    """Children of the fork server."""
    children = psutil.Process().children()
    servers = [p for p in children if "multiprocessing.forkserver" in " ".join(p.cmdline())]
    return [process for server in servers for process in server.children()]


def test_many_are_answered_once_each(asking: Callable[..., Asked]) -> None:
    answers = asking(processes=2).ask(*(f"t{n}" for n in range(1000))).wait()
    assert {result.value for result in answers.values()} == {1.0}


@pytest.mark.parametrize(("guilty", "limit_s"), [("die", 30), ("hang", 1), ("exit", 30)])
def test_the_guilty_one_is_found_and_the_others_are_scored(
    asking: Callable[..., Asked], guilty: str, limit_s: int
) -> None:
    uids = [*(f"a{n}" for n in range(20)), guilty, *(f"b{n}" for n in range(20))]
    asked = asking(f"timeout_s={limit_s}&attempts=2").ask("slow", *uids)
    answers = asked.wait()
    why = f"it did not return within {limit_s} s, or its process died, in each of 2 attempts"
    assert answers[guilty].failure == why
    assert {result.value for uid, result in answers.items() if uid != guilty} == {1.0}
    assert asked.ask("afterwards").wait()["afterwards"].value == 1.0


@pytest.mark.parametrize(
    ("uid", "why"),
    [
        ("memory", "MemoryError: "),
        ("never", "no use"),
        ("away", "no judge"),
        ("odd", "ValueError: half a ?"),
    ],
)
def test_what_a_function_raises_costs_no_process(
    asking: Callable[..., Asked], uid: str, why: str
) -> None:
    answers = asking("timeout_s=30&attempts=2").ask("before", uid, "after").wait()
    assert answers[uid].failure == why
    assert answers[uid].is_outage is (uid == "away")
    assert answers["before"].details == answers["after"].details


def test_several_guilty_ones_do_not_take_each_other_down(asking: Callable[..., Asked]) -> None:
    uids = ["die1", "good1", "die2", "hang1", "good2", "die3"]
    answers = asking("timeout_s=3&attempts=1").ask(*uids).wait()
    assert {uid for uid, result in answers.items() if result.failure is None} == {
        "good1",
        "good2",
    }


def test_slow_is_not_silent(asking: Callable[..., Asked]) -> None:
    """Together they take longer than one may; each in turn is a sign of life."""
    answers = asking("timeout_s=6&attempts=1").ask(*(f"slow{n}" for n in range(32))).wait()
    assert {result.failure for result in answers.values()} == {None}
    assert len({result.details for result in answers.values()}) == 1


def test_a_process_that_is_killed_from_outside_is_replaced(asking: Callable[..., Asked]) -> None:
    asked = asking("timeout_s=30&attempts=1").ask("first")
    asked.wait()
    [process] = scoring_processes()
    process.kill()
    answers = asked.ask("second", "third").wait()
    assert (answers["second"].value, answers["third"].value) == (1.0, 1.0)
    assert answers["second"].details != answers["first"].details


@pytest.mark.parametrize("first", ["slow", "hang"])
def test_what_nobody_wants_any_more_is_not_scored(
    asking: Callable[..., Asked], first: str, rewards: Path
) -> None:
    asked = asking("timeout_s=30&attempts=1")
    asked.unwanted = {"hang", "hang2"}
    answers = asked.ask(first, "hang2", "last").wait()
    assert answers["hang2"] is UNASKED
    assert answers["last"].value == 1.0
    assert not rewards.with_name("hangs").exists()


def test_closing_does_not_wait_for_what_runs(asking: Callable[..., Asked], rewards: Path) -> None:
    asked = asking("timeout_s=100&attempts=1").ask("hang", *(f"slow{n}" for n in range(300)))
    hanging = rewards.with_name("hangs")
    wait_until(hanging.exists)
    before = time.monotonic()
    asked.isolated.close()
    assert time.monotonic() - before < 30, "the slow ones take 60 s"
    assert not scoring_processes()
    assert not asked.answers


def test_a_function_that_is_gone_stops_scoring_with_the_reason(
    asking: Callable[..., Asked], rewards: Path
) -> None:
    asked = asking("timeout_s=30&attempts=1").ask("first")
    asked.wait()
    rewards.unlink()
    asked.ask("die")
    wait_until(lambda: asked.isolated.error is not None)
    assert isinstance(asked.isolated.error, Fatal)
    assert "did not start" in str(asked.isolated.error)


def test_a_process_has_no_thread_and_no_socket_of_the_worker(asking: Callable[..., Asked]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        ours.set_inheritable(True)
        answers = asking().ask("threads", "files").wait()
        inode = f"socket:[{os.fstat(ours.fileno()).st_ino}]"
    assert answers["threads"].value == 1.0
    assert inode not in answers["files"].details


def test_a_process_dies_with_its_worker(rewards: Path) -> None:
    hanging = rewards.with_name("hangs")
    worker = multiprocessing.get_context("spawn").Process(target=hang_in, args=(rewards,))
    worker.start()
    wait_until(lambda: hanging.exists() and hanging.read_text() != "")
    process = psutil.Process(int(hanging.read_text()))
    worker.kill()
    worker.join()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def hang_in(rewards: Path) -> None:
    specs = [f"{rewards}:score"]
    asked = Asked(lambda *told: ProcessPool(specs, load_all(specs), None, 1, *told))
    asked.ask("hang")
    threading.Event().wait()


def wait_until(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
