"""Many at once, many workers: what is slow holds up nobody else, and nothing is repeated."""

import json
import textwrap
import time
from pathlib import Path

import pytest

from pool.connection import Connection
from pool.topics import STEPS
from tests.pool.log import write
from tests.reward.running import (
    answered,
    ends,
    running_worker,
    wait_for,
    wait_for_ends,
)
from tests.reward.under_load import (
    Committed,
    Load,
    assert_rewarded_complete,
    lag,
    settle,
    wait_for_assignment,
    wait_for_progress,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(
        textwrap.dedent(
            """
            import asyncio, time
            from pathlib import Path
            from steplog import Reward

            inside = most = 0
            full = asyncio.Event()

            async def judge(trajectory):
                global inside, most
                inside += 1
                most = max(most, inside)
                if inside == trajectory.metadata["room"]:
                    full.set()
                await full.wait()
                await asyncio.sleep(0.5)  # for those who must not come in
                inside -= 1
                return Reward(1.0, details={"most": most})

            async def stuck(trajectory):
                is_slow = trajectory.prompt_uid == "slow"
                if is_slow and (Path(__file__).parent / "down").exists():
                    await asyncio.sleep(1000)
                return 1.0

            def busy(trajectory):
                number = int(trajectory.uid.rpartition(".")[2])
                time.sleep(3 if number % 40 == 7 else 0)
                return 1.0
            """
        )
    )
    return file


def write_many(log: Connection, count: int, prompts: int = 10, **metadata: int) -> None:
    trajectories = (
        answered(f"t{n}", "x", prompt=f"p{n % prompts}", metadata=metadata) for n in range(count)
    )
    write(log, STEPS, [record for records in trajectories for record in records])


@pytest.mark.parametrize("at_once", [100, 7])
def test_judges_run_at_once_as_many_as_may(log: Connection, rewards: Path, at_once: int) -> None:
    write_many(log, 3 * at_once, room=at_once)
    with running_worker(log, "--function", f"{rewards}:judge?at_once={at_once}") as worker:
        found = wait_for_ends(log, 3 * at_once, worker)
    crowds = [json.loads(end.rewards[0].details)["most"] for end in found.values()]
    assert max(crowds) == at_once
    assert_rewarded_complete(log)


@pytest.mark.slow
def test_a_slow_judge_holds_up_its_own_key_only_and_its_place_is_kept(
    log: Connection, rewards: Path
) -> None:
    down = rewards.with_name("down")
    down.touch()
    slow = [*answered("slow1", "x", prompt="slow"), *answered("slow2", "x", prompt="slow")]
    write(log, STEPS, slow)
    write_many(log, 50)
    options = ["--function", f"{rewards}:stuck?timeout_s=2000"]
    with running_worker(log, *options) as worker:
        found = wait_for_ends(log, 50, worker)
        wait_for(lambda: lag(log) == 0, worker)
        assert "slow1" not in found and "slow2" not in found
        assert worker.terminate() == 0  # long before what hangs would end
    down.unlink()
    with running_worker(log, *options) as worker:
        assert list(wait_for_ends(log, 52, worker)).count("slow1") == 1
    assert_rewarded_complete(log)


@pytest.mark.slow
def test_workers_join_and_leave_while_one_is_busy(log: Connection, rewards: Path) -> None:
    options = ["--function", f"{rewards}:busy"]
    with (
        Load(log, rate=20) as load,
        Committed(log) as committed,
        running_worker(log, *options, slot="a") as first,
        running_worker(log, *options, slot="b"),
    ):
        wait_for_progress(log, 20, first)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with running_worker(log, *options, slot="c") as third:
                wait_for_assignment(third)
                time.sleep(3)
                assert third.terminate() == 0
                assert "Traceback" not in third.log.read_text()
        load.finish()
        settle(log, first)
    assert committed.went_back == []
    assert {end.reward for end in ends(log).values()} == {1.0}
