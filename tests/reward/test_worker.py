"""The worker on a real broker: what comes out of it, and what a bad function does."""

import textwrap
from pathlib import Path

import pytest

from pool.connection import Connection
from pool.core.rewards import feedback_of, given_rewards
from pool.core.trajectories import StrayRecord, Trajectory
from pool.readers.dataset import Dataset
from pool.readers.selection import SelectionSettings
from pool.topics import REWARDED, STEPS, TRAJECTORIES
from reward.worker.expiry import expired_id
from schemas import Feedback, Registration, Step, TrajectoryEnd
from tests.pool.log import records, write
from tests.pool.records import end, feedback, step
from tests.reward.running import (
    answered,
    dead_letters,
    ends,
    running_worker,
    steps,
    wait_for,
    wait_for_ends,
)
from tests.reward.under_load import lag

pytestmark = pytest.mark.broker


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(
        textwrap.dedent(
            """
            import time
            from steplog import Reward

            def score(trajectory):
                if "raise" in trajectory.text:
                    raise ValueError("cannot read it")
                if "nan" in trajectory.text:
                    return float("nan")
                if "none" in trajectory.text:
                    return None
                return trajectory.text == trajectory.metadata["answer"]

            def hang(trajectory):
                while "loop" in trajectory.text:
                    pass
                if "sleep" in trajectory.text:
                    time.sleep(1000)
                return 1.0

            def each(trajectory):
                return Reward(0.5, steps=[float(len(step.text)) for step in trajectory.steps])

            async def slowly(trajectory):
                return 2.0
            """
        )
    )
    return file


def test_functions_score_what_agents_did(log: Connection, functions: Path, tokenizer: Path) -> None:
    write(log, STEPS, answered("right", "42", metadata={"answer": "42"}))
    write(log, STEPS, answered("wrong", "41", metadata={"answer": "42"}))
    write(log, STEPS, answered("unknown", "none", reward=0.75))
    write(log, STEPS, answered("cancelled", "42", status="cancelled"))
    specs = f"{functions}:score,{functions}:slowly?weight=0.25"
    with running_worker(log, "--function", specs, "--tokenizer", str(tokenizer)) as worker:
        found = wait_for_ends(log, 4, worker)
    assert (found["right"].reward, found["wrong"].reward) == (1.5, 0.5)
    assert found["unknown"].reward == 0.5
    assert (found["cancelled"].reward, found["cancelled"].status) == (None, "cancelled")
    assert [(r.name, r.value) for r in found["right"].rewards] == [("score", 1.0), ("slowly", 2.0)]
    assert all(r.version for r in found["right"].rewards)


def test_without_functions_what_agents_said_is_taken_over(log: Connection) -> None:
    write(log, STEPS, answered("a", "x", reward=0.25))
    write(log, STEPS, answered("b", "x"))
    with running_worker(log) as worker:
        found = wait_for_ends(log, 2, worker)
        assert worker.terminate() == 0
    assert (found["a"].reward, found["b"].reward) == (0.25, None)


def test_only_the_channels_that_were_asked_for_are_scored(
    log: Connection, functions: Path, tokenizer: Path
) -> None:
    """A function for `train` need not understand what others write beside it."""
    strange = (answered(f"strange-{n}", "41", f"s{n}", channel="unbound") for n in range(120))
    write(log, STEPS, [record for trajectory in strange for record in trajectory])
    for channel in ("train", "val", "math"):
        write(log, STEPS, answered(channel, "42", channel=channel, metadata={"answer": "42"}))
    options = ["--function", f"{functions}:score", "--tokenizer", str(tokenizer)]
    with running_worker(log, *options) as worker:
        found = wait_for_ends(log, 2, worker)
        wait_for(lambda: lag(log) == 0, worker)
        assert "channel unbound is not scored" in worker.log.read_text()
    assert {uid: found[uid].reward for uid in found} == {"train": 1.0, "val": 1.0}
    assert ends(log).keys() == found.keys()
    more = ["--channels", "math", "--group", "math-rewards"]
    with running_worker(log, *options, *more, slot="1") as worker:
        assert wait_for_ends(log, 3, worker)["math"].reward == 1.0


def test_feedback_on_steps_is_summed_and_does_not_revive_an_expired_trajectory(
    log: Connection,
) -> None:
    expired = end("e", end_id=expired_id("e"), status="expired")
    write(log, STEPS, [step("t-0"), feedback(0.5, step_id="t-0"), step("t-1", index=1)])
    write(log, STEPS, [step("e-0", "e", reward=1.0), expired, feedback(0.25, "e"), end("e")])
    write(log, STEPS, [end(steps=2), feedback(0.25, step_id="t-1"), feedback(0.75, "e")])
    with running_worker(log) as worker:
        wait_for(lambda: len(records(log, REWARDED)) == 10, worker)
    with Dataset(log, REWARDED, SelectionSettings()) as dataset:
        items = list(dataset.items())
    late = [item.received for item in items if isinstance(item, StrayRecord)]
    feedback_after = [one for one in late if isinstance(one.record, Feedback)]
    rewards = {}
    for trajectory in (item for item in items if isinstance(item, Trajectory)):
        own = [one for one in feedback_after if feedback_of(one).trajectory_uid == trajectory.uid]
        counting = given_rewards(trajectory, own).counting
        rewards[trajectory.uid] = (trajectory.end.status, trajectory.end.reward, counting)
    assert rewards == {"t": ("completed", 0.5, 0.75), "e": ("expired", None, 0.75)}


def test_a_bad_function_fails_its_trajectory_and_no_other(
    log: Connection, functions: Path, tokenizer: Path
) -> None:
    for uid in ("raise", "nan", "good"):
        write(log, STEPS, answered(uid, uid, metadata={"answer": "good"}))
    with running_worker(
        log, "--function", f"{functions}:score", "--tokenizer", str(tokenizer)
    ) as worker:
        found = wait_for_ends(log, 3, worker)
    assert found["good"].reward == 1.0
    assert found["raise"].status == found["nan"].status == "failed"
    assert found["raise"].reason == "reward score: ValueError: cannot read it"
    assert "not finite" in str(found["nan"].reason)
    letters = dead_letters(log)
    uids = {log.codec().decode(letter.value).trajectory_uid for letter in letters}  # type: ignore[attr-defined]
    assert uids == {"raise", "nan"}
    headers = dict(letters[0].headers)
    assert headers["steplog.topic"].decode() == log.topic_name(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loop", "sleep"])
def test_a_function_that_hangs_is_ended_and_the_others_go_on(
    log: Connection, functions: Path, tokenizer: Path, how: str
) -> None:
    for uid in ("before", how, "after"):
        write(log, STEPS, answered(uid, uid, prompt=uid))
    spec = f"{functions}:hang?timeout_s=1&attempts=2"
    with running_worker(log, "--function", spec, "--tokenizer", str(tokenizer)) as worker:
        found = wait_for_ends(log, 3, worker)
    assert found["before"].reward == found["after"].reward == 1.0
    assert found[how].status == "failed"
    assert "did not return within 1 s" in str(found[how].reason)


def test_process_rewards_are_on_the_steps(
    log: Connection, functions: Path, tokenizer: Path
) -> None:
    write(
        log,
        STEPS,
        [
            step("a", "t", response=list(b"abc")),
            step("b", "t", response=list(b"de")),
            end("t", steps=2),
        ],
    )
    with running_worker(
        log, "--function", f"{functions}:each", "--tokenizer", str(tokenizer)
    ) as worker:
        found = wait_for_ends(log, 1, worker)
    assert found["t"].reward == 0.5
    assert {s.step_id: s.reward for s in steps(log)} == {"a": 3.0, "b": 2.0}


def test_an_overdue_trajectory_is_ended_once_and_gateways_hear_of_it(log: Connection) -> None:
    write(log, STEPS, [step("a", "old", deadline=1), step("b", "new", deadline=4_000_000_000_000)])
    with running_worker(log) as worker:
        found = wait_for_ends(log, 1, worker)
    assert (found["old"].status, found["old"].reward) == ("expired", None)
    written = [r for r in records(log, STEPS) if isinstance(r, TrajectoryEnd)]
    assert [r.trajectory_uid for r in written] == ["old"]
    (closed,) = records(log, TRAJECTORIES)
    assert isinstance(closed, Registration)
    assert (closed.trajectory_uid, closed.status) == ("old", "expired")


def test_compute_reward_uses_the_same_functions(
    log: Connection, functions: Path, tokenizer: Path
) -> None:
    specs = f"{functions}:score,{functions}:slowly?weight=0.5"
    with running_worker(log, "--function", specs, "--tokenizer", str(tokenizer)) as worker:
        wait_for(lambda: _is_up(worker.url), worker)
        body = {"prompt_ids": [1], "response_ids": list(b"42"), "dataset_fields": {"answer": "42"}}
        status, told = worker.post("/compute_reward", body)
        assert (status, told["reward_score"]) == (200, 2.0)
        assert told["reward_extra_info"]["score"]["value"] == 1.0
        status, told = worker.post("/compute_reward", {"prompt_ids": "x"})
        assert status == 422
        body["response_ids"] = list(b"raise")
        status, told = worker.post("/compute_reward", body)
        assert status == 422 and "cannot read it" in told["error"]["message"]
        assert "reward_duration_seconds" in worker.get("/metrics")


def _is_up(url: str) -> bool:
    import urllib.request

    try:
        with urllib.request.urlopen(url + "/health", timeout=5):
            return True
    except OSError:
        return False


def test_records_keep_the_order_of_their_key(
    log: Connection, functions: Path, tokenizer: Path
) -> None:
    uids = [f"t{number}" for number in range(30)]
    for_all = [answered(uid, uid, metadata={"answer": "t7"}) for uid in uids]
    write(log, STEPS, [record for trajectory in for_all for record in trajectory])
    with running_worker(
        log, "--function", f"{functions}:score", "--tokenizer", str(tokenizer)
    ) as worker:
        wait_for_ends(log, 30, worker)
    order = [s.trajectory_uid for s in steps(log)]
    assert order == uids
    assert all(isinstance(s, Step) for s in steps(log))
