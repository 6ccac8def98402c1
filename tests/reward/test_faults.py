"""Workers die, stand still, and meet bad functions and bad records: `rewarded` does not show it."""

import random
import signal
import textwrap
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer as ConfluentProducer

from pool.connection import Connection
from pool.topics import REWARDED, STEPS
from reward.scoring.async_functions import WARNING_INTERVAL_S
from schemas import Feedback, TrajectoryEnd
from tests.pool.log import messages, records, write
from tests.pool.records import end, feedback, step
from tests.reward.dying import dying_worker
from tests.reward.running import (
    RunningWorker,
    answered,
    dead_letters,
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
    missing,
    owned,
    pause,
    settle,
    wait_for_assignment,
    wait_for_progress,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

DEADLY = {"produced": 3, "offsets sent": 3, "rebuilding": 20, "revoking": 1}
"""How often a stage is reached before it kills."""
RANDOM_KILLS = 5


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(
        textwrap.dedent(
            """
            import asyncio, os, random, time
            from pathlib import Path
            from steplog import Reward, RewardUnavailable

            HERE = Path(__file__).parent

            def is_down():
                return (HERE / "down").exists()

            def called():
                with (HERE / "calls").open("a") as calls:
                    calls.write(".")

            def quick(trajectory):
                return 1.0

            def sometimes_slow(trajectory):
                time.sleep(0.2 if random.random() < 0.05 else 0)
                return 1.0

            async def jittery(trajectory):
                await asyncio.sleep(random.uniform(0, 0.3))
                return 1.0

            def hang(trajectory):
                called()
                time.sleep(1000 if is_down() else 0)
                return 1.0

            def wait_for_plain(trajectory):
                called()
                if is_down():
                    raise RewardUnavailable("no judge")
                return 1.0

            async def wait_for_judge(trajectory):
                called()
                if is_down():
                    raise RewardUnavailable("no judge")
                return 1.0

            def kill_myself(trajectory):
                if trajectory.uid == "deadly":
                    os._exit(1)
                return 1.0

            def fail(trajectory):
                if is_down():
                    raise ValueError("broken")
                return 1.0
            """
        )
    )
    return file


def go_down(rewards: Path) -> None:
    rewards.with_name("down").touch()


def come_back(rewards: Path) -> None:
    rewards.with_name("down").unlink()


def calls(rewards: Path) -> int:
    file = rewards.with_name("calls")
    return len(file.read_text()) if file.exists() else 0


def both(rewards: Path) -> list[str]:
    return ["--function", f"{rewards}:sometimes_slow,{rewards}:jittery"]


# F5: killed


@pytest.mark.slow
def test_a_worker_killed_at_any_moment_writes_each_record_once(
    log: Connection, rewards: Path
) -> None:
    chance = random.Random(5)
    with Load(log) as load:
        for _ in range(RANDOM_KILLS):
            with running_worker(log, *both(rewards)) as worker:
                wait_for_progress(log, 20, worker)
                pause(chance, 1.5)
                worker.kill()
        load.finish()
        with running_worker(log, *both(rewards)) as worker:
            settle(log, worker)
            assert worker.terminate() == 0
    assert_rewarded_complete(log)
    assert len(load.acknowledged) == len(records(log, REWARDED))


@pytest.mark.slow
@pytest.mark.parametrize("stage", DEADLY)
def test_a_worker_killed_inside_a_transaction_writes_each_record_once(
    log: Connection, rewards: Path, stage: str
) -> None:
    with Load(log) as load:
        with running_worker(log, *both(rewards)) as worker:
            wait_for_progress(log, 100, worker)
            assert worker.terminate() == 0
        with dying_worker(log, stage, DEADLY[stage], *both(rewards)) as worker:
            if stage == "revoking":
                die_of_revocation(log, rewards, worker)
            assert worker.process.wait(120) == -signal.SIGKILL
        load.finish()
        with running_worker(log, *both(rewards)) as worker:
            settle(log, worker)


def die_of_revocation(log: Connection, rewards: Path, worker: RunningWorker) -> None:
    """Another comes, and takes partitions from it."""
    wait_for_assignment(worker)
    with running_worker(log, *both(rewards), slot="other") as other:
        wait_for(lambda: worker.process.poll() is not None, other)
        wait_for_assignment(other)
        assert other.terminate() == 0


@pytest.mark.slow
def test_a_worker_killed_in_a_function_has_written_nothing_of_it(
    log: Connection, rewards: Path
) -> None:
    go_down(rewards)
    for number in range(5):
        write(log, STEPS, answered(f"t{number}", "x"))
    with running_worker(log, "--function", f"{rewards}:hang") as worker:
        wait_for(lambda: calls(rewards), worker)
        wait_for(lambda: lag(log) == 0, worker)
        worker.kill()
    assert not records(log, REWARDED)
    come_back(rewards)
    with running_worker(log, "--function", f"{rewards}:hang") as worker:
        assert len(wait_for_ends(log, 5, worker)) == 5
        assert_rewarded_complete(log)


# F6: stopped


@pytest.mark.slow
def test_a_worker_that_stood_still_commits_nothing_late(log: Connection, rewards: Path) -> None:
    with (
        Load(log) as load,
        Committed(log) as committed,
        running_worker(log, *both(rewards), slot="other") as other,
    ):
        for _ in range(2):
            with running_worker(log, *both(rewards), slot="zombie") as zombie:
                wait_for_assignment(zombie)
                time.sleep(1)  # and it works on it
                zombie.process.send_signal(signal.SIGSTOP)
                wait_for(lambda: owned(other) == {0, 1, 2, 3}, other)
                wait_for_progress(log, 100, other)
                zombie.process.send_signal(signal.SIGCONT)
                wait_for_progress(log, 200, other)
                wait_for_end_or_loss(zombie)
        load.finish()
        settle(log, other)
    assert committed.seen > 100
    assert committed.went_back == []


def wait_for_end_or_loss(zombie: RunningWorker) -> None:
    """It has lost its partitions and goes on, or its open transaction was ended by the broker, and
    it stops for a supervisor to start it again."""

    def is_told() -> bool:
        said = zombie.log.read_text()
        return "Gave up" in said or zombie.process.poll() is not None

    wait_for(is_told)
    code = zombie.terminate()  # it may be about to end by itself
    stopped = "Another process took over transactional id" in zombie.log.read_text()
    assert stopped or code == 0


# F12: poison


@pytest.mark.slow
def test_poison_goes_to_dead_letters_and_the_rest_goes_on(log: Connection, rewards: Path) -> None:
    name, codec = log.topic_name(STEPS), log.codec()
    whole = codec.encode(step("cut"), name)
    poison = {
        "garbage": b"\x00garbage",
        "unknown schema": b"\xc3\x01" + bytes(8) + b"x",
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
    }
    write(log, STEPS, answered("before", "x"))
    producer = ConfluentProducer(log.confluent(partitioner="murmur2_random"))
    for why, value in poison.items():
        producer.produce(name, value, b"p", headers=[("why", why.encode())])
    producer.produce(name, None, b"p")  # what a deletion leaves is no poison
    producer.flush()
    write(log, STEPS, answered("after", "x"))
    for _ in range(2):  # and nothing of it again after a restart
        with running_worker(log, "--function", f"{rewards}:quick") as worker:
            wait_for_assignment(worker)
            found = wait_for_ends(log, 2, worker)
            wait_for(lambda: lag(log) == 0, worker)
            assert worker.terminate() == 0
    assert {end.reward for end in found.values()} == {1.0}
    letters = dead_letters(log)
    assert {dict(letter.headers)["why"].decode(): letter.value for letter in letters} == poison
    assert len(letters) == len(poison)
    at = {(message.partition, message.offset): message.value for message in messages(log, STEPS)}
    for letter in letters:
        headers = {name: value.decode() for name, value in letter.headers}
        assert letter.key == b"p"
        assert (headers["steplog.topic"], headers["steplog.stage"]) == (name, "steplog-reward")
        place = int(headers["steplog.partition"]), int(headers["steplog.offset"])
        assert at[place] == letter.value
        assert headers["steplog.reason"]


def test_a_topic_of_poison_stops_the_worker(log: Connection) -> None:
    producer = ConfluentProducer(log.confluent(partitioner="murmur2_random"))
    for _ in range(150):
        producer.produce(log.topic_name(STEPS), b"garbage", b"p")
    producer.flush()
    with running_worker(log) as worker:
        assert worker.process.wait(60) == 1
        said = worker.log.read_text().splitlines()[-1]
    assert said.startswith("steplog: 100 of the last 100 records cannot be used, the last one ")


# Functions that cannot be relied on


@pytest.mark.slow
@pytest.mark.parametrize("function", ["wait_for_plain", "wait_for_judge"])
def test_an_outage_is_waited_for(log: Connection, rewards: Path, function: str) -> None:
    go_down(rewards)
    for number in range(10):
        write(log, STEPS, answered(f"t{number}", "x", prompt=f"p{number % 3}"))
    began = time.monotonic()
    with running_worker(log, "--function", f"{rewards}:{function}") as worker:
        wait_for(lambda: calls(rewards) > 20, worker)
        told = worker.log.read_text().count("trajectories wait: no judge")
        assert 1 <= told <= 1 + (time.monotonic() - began) // WARNING_INTERVAL_S
        assert not records(log, REWARDED)
        come_back(rewards)
        found = wait_for_ends(log, 10, worker)
        assert {end.reward for end in found.values()} == {1.0}
        assert 'reward_retries_total{reward="' + function in worker.get("/metrics")
    assert not dead_letters(log)
    assert_rewarded_complete(log)


@pytest.mark.slow
def test_an_outage_holds_reading_up_and_survives_a_kill(log: Connection, rewards: Path) -> None:
    go_down(rewards)
    count, at_once, batch = 3000, 100, 500
    everything = [
        record
        for number in range(count)
        for record in answered(f"t{number}", "x", prompt=f"p{number % 30}")
    ]
    write(log, STEPS, everything)
    options = ["--function", f"{rewards}:wait_for_judge", "--at-once", str(at_once)]
    for _ in range(3):
        with running_worker(log, *options) as worker:
            wait_for_calls(rewards, 2 * at_once, worker)
            assert wait_until_in_hand(worker, at_once) <= at_once + batch
            assert lag(log) >= 2 * count - 3 * (at_once + batch)
            worker.kill()
    assert not records(log, REWARDED)
    with running_worker(log, *options) as worker:
        wait_for(lambda: in_hand(worker), worker)
        come_back(rewards)
        settle(log, worker)


def wait_for_calls(rewards: Path, count: int, worker: RunningWorker) -> None:
    before = calls(rewards)
    wait_for(lambda: calls(rewards) >= before + count, worker)


def wait_until_in_hand(worker: RunningWorker, count: int) -> int:
    """What it tells is true after each of its turns, and it calls functions within one."""
    wait_for(lambda: in_hand(worker) >= count, worker)
    return in_hand(worker)


def in_hand(worker: RunningWorker) -> int:
    try:
        told = worker.get("/metrics").splitlines()
    except OSError:  # it does not listen yet
        return 0
    return int(float(next(line.split()[1] for line in told if line.startswith("reward_in_hand "))))


@pytest.mark.slow
def test_a_function_that_kills_its_process_fails_its_trajectory_only(
    log: Connection, rewards: Path
) -> None:
    for uid in ("before", "deadly", "after"):
        write(log, STEPS, answered(uid, "x"))
    with running_worker(log, "--function", f"{rewards}:kill_myself?attempts=2") as worker:
        found = wait_for_ends(log, 3, worker)
    assert (found["before"].reward, found["after"].reward) == (1.0, 1.0)
    assert (found["deadly"].status, found["deadly"].reward) == ("failed", None)
    assert "or its process died, in each of 2 attempts" in str(found["deadly"].reason)
    [letter] = dead_letters(log)
    assert log.codec().decode(letter.value).trajectory_uid == "deadly"  # type: ignore[attr-defined]
    assert_rewarded_complete(log)


@pytest.mark.slow
def test_a_worker_that_fails_on_everything_stops_before_it_has_spoiled_anything(
    log: Connection, rewards: Path
) -> None:
    go_down(rewards)
    trajectories = (answered(f"t{n}", "x", prompt=f"p{n % 7}") for n in range(300))
    write(log, STEPS, [record for records in trajectories for record in records])
    options = ["--function", f"{rewards}:fail"]
    for _ in range(3):
        with running_worker(log, *options) as worker:
            assert worker.process.wait(60) == 1
            *_, said = worker.log.read_text().splitlines()
        assert said.startswith("steplog: Reward fail failed on 100 trajectories in a row; on the ")
        assert "in channel train: ValueError: broken. Correct the function" in said
        assert said.endswith("restart the worker: it scores the last 100 again.")
    assert not records(log, REWARDED) and not dead_letters(log)
    come_back(rewards)
    with running_worker(log, *options) as worker:
        settle(log, worker)
    assert Counter(end.status for end in ends(log).values()) == {"completed": 300}


def test_a_function_that_breaks_later_loses_nothing_that_came_since(
    log: Connection, rewards: Path
) -> None:
    """It needs a worker that has scored, stops by itself, and is started again."""
    options = ["--function", f"{rewards}:fail"]
    with running_worker(log, *options) as worker:
        write(log, STEPS, answered("before", "x"))
        wait_for_ends(log, 1, worker)
        go_down(rewards)
        trajectories = (answered(f"t{n}", "x", prompt=f"p{n % 7}") for n in range(120))
        write(log, STEPS, [record for records in trajectories for record in records])
        assert worker.process.wait(60) == 1
    assert set(ends(log)) == {"before"} and not dead_letters(log)
    come_back(rewards)
    with running_worker(log, *options) as worker:
        settle(log, worker)
    assert Counter(end.status for end in ends(log).values()) == {"completed": 121}


@pytest.mark.slow
def test_a_few_failures_come_out_although_nothing_else_does(log: Connection, rewards: Path) -> None:
    go_down(rewards)
    for number in range(3):
        write(log, STEPS, answered(f"t{number}", "x"))
    with running_worker(log, "--function", f"{rewards}:fail") as worker:
        found = wait_for_ends(log, 3, worker)
        assert {end.status for end in found.values()} == {"failed"}
        write(log, STEPS, answered("late", "x"))
        assert wait_for_ends(log, 4, worker)["late"].status == "failed"
    assert_rewarded_complete(log)
    assert len(dead_letters(log)) == 4


def test_a_worker_whose_function_is_gone_stops_and_says_so(log: Connection, rewards: Path) -> None:
    with running_worker(log, "--function", f"{rewards}:kill_myself") as worker:
        write(log, STEPS, answered("good", "x"))
        wait_for_ends(log, 1, worker)
        rewards.unlink()
        write(log, STEPS, answered("deadly", "x"))
        assert worker.process.wait(60) == 1
        *_, said = worker.log.read_text().splitlines()
    assert said.startswith("steplog: a process for reward functions did not start")
    assert set(ends(log)) == {"good"}


# What is not a fault


@pytest.mark.slow
def test_sigterm_commits_what_is_finished_and_does_not_wait_for_functions(
    log: Connection, rewards: Path
) -> None:
    go_down(rewards)
    write(log, STEPS, answered("running", "x", prompt="a"))
    write(log, STEPS, answered("cancelled", "x", prompt="b", status="cancelled"))
    with running_worker(log, "--function", f"{rewards}:hang,{rewards}:wait_for_judge") as worker:
        wait_for(lambda: calls(rewards), worker)
        wait_for_ends(log, 1, worker)
        assert worker.terminate() == 0  # long before what hangs would end
        assert "Traceback" not in worker.log.read_text()
        assert "destroyed" not in worker.log.read_text()
    assert set(ends(log)) == {"cancelled"}
    come_back(rewards)
    with running_worker(log, "--function", f"{rewards}:hang") as worker:
        wait_for_ends(log, 2, worker)
    assert_rewarded_complete(log)


def test_ctrl_c_in_a_terminal_ends_it_quietly(log: Connection, rewards: Path) -> None:
    """There every process of the worker gets the signal."""
    write(log, STEPS, answered("a", "x"))
    options = ["--function", f"{rewards}:quick"]
    with running_worker(log, *options) as worker:
        wait_for_ends(log, 1, worker)
        whole = psutil.Process(worker.process.pid)
        for process in [*whole.children(recursive=True), whole]:
            process.send_signal(signal.SIGINT)
        assert worker.process.wait(60) == 0
        assert "Traceback" not in worker.log.read_text()


def test_feedback_is_copied_in_its_place(log: Connection, rewards: Path) -> None:
    write(
        log,
        STEPS,
        [
            step("a", "t"),
            feedback(0.1, id="while open"),
            end("t", steps=1, reward_expected=True),
            feedback(0.2, id="right after"),
            feedback(0.3, "unheard of", id="without trajectory"),
        ],
    )
    with running_worker(log, "--function", f"{rewards}:quick") as worker:
        found = wait_for_ends(log, 1, worker)
        assert found["t"].reward_expected
        write(log, STEPS, [feedback(0.4, id="much later")])
        wait_for(lambda: not missing(log), worker)
        wait_for(lambda: lag(log) == 0, worker)
    order = [
        record.feedback_id if isinstance(record, Feedback) else type(record).__name__
        for record in records(log, REWARDED)
    ]
    assert order == [
        "Step",
        "while open",
        "TrajectoryEnd",
        "right after",
        "without trajectory",
        "much later",
    ]
    [closed] = [r for r in records(log, REWARDED) if isinstance(r, TrajectoryEnd)]
    assert (closed.reward, closed.reward_expected) == (1.0, True)
    assert_rewarded_complete(log)


def lags(worker: RunningWorker) -> list[float]:
    told = worker.get("/metrics").splitlines()
    return [float(line.split()[-1]) for line in told if line.startswith("kafka_consumergroup_lag{")]


def test_metrics_say_what_was_done(log: Connection, rewards: Path) -> None:
    write(log, STEPS, [*answered("a", "x"), *answered("b", "x", status="cancelled")])
    with running_worker(log, "--function", f"{rewards}:quick") as worker:
        wait_for_ends(log, 2, worker)
        wait_for(lambda: in_hand(worker) == 0, worker)
        wait_for(lambda: lags(worker) == [0.0] * 4, worker)
        told = worker.get("/metrics")
        assert worker.get("/ready") == '{"status":"ready"}'
    for line in (
        'reward_processed_total{outcome="completed"} 1.0',
        'reward_processed_total{outcome="cancelled"} 1.0',
        'reward_value_bucket{channel="train",le="1.0",reward="quick"} 1.0',
        'reward_duration_seconds_count{reward="quick"} 1.0',
        "consumer_last_progress_timestamp_seconds ",
    ):
        assert line in told, line
