"""The environments of examples/, served to a real gateway on a real broker, as their users run them."""

import json
from pathlib import Path

import pytest

from tests.gateway.running import RunningGateway
from tests.reward.running import ends, running_worker, wait_for
from tests.steplog.command import steplog
from tests.steplog.environment.recorded_log import RecordedLog, lines, numbers, prompts

pytestmark = pytest.mark.broker

ENVIRONMENTS = Path(__file__).parents[3] / "examples" / "environments"


CLASSES = {
    "arithmetic_tool": "ArithmeticTool",
    "guess_the_number": "GuessTheNumber",
    "code_unit_tests": "CodeUnitTests",
}


def run(example: str, *words: str) -> str:
    spec = f"{ENVIRONMENTS / example}.py:{CLASSES[example]}"
    done = steplog("env", spec, *words, "--dir", "kept")
    assert done.returncode == 0, done.stderr
    return done.stdout


def serve(gateway: RunningGateway, example: str, *words: str) -> RecordedLog:
    """What the log has of the groups that it served."""
    run(example, "serve", "--gateway", gateway.url, "--jsonl", *words)
    return RecordedLog(gateway.connection, prompts(Path("kept/rollouts.jsonl")))


def test_arithmetic_with_a_tool(gateway: RunningGateway) -> None:
    arrived = serve(gateway, "arithmetic_tool", "--groups", "3", "--group-size", "4")
    groups = arrived.complete_groups(4)
    assert numbers(groups) == [0, 1, 2]
    members = [told for group in groups.values() for told in group]
    assert {told.end.status for told in members} == {"completed"}
    assert {told.end.reward for told in members} == {0.0, 1.0}
    for told in members:
        assert len(told.steps) == told.end.steps == (2 if told.end.reward else 1), "with the tool"
        assert [step.parent is None for step in told.steps] == [True, False][: len(told.steps)]
        about = json.loads(told.end.metadata)
        assert about["environment"] == "arithmetic-tool" and about["answer"] > 0
        assert told.end.group_size == 4
    check_what_is_kept_for_people()


def check_what_is_kept_for_people() -> None:
    kept = lines(Path("kept/rollouts.jsonl"))
    assert sorted(line["number"] for line in kept) == [0, 1, 2]
    rollouts = [rollout for line in kept for rollout in line["rollouts"]]
    right = next(rollout for rollout in rollouts if rollout["reward"] == 1)
    (messages,) = right["conversations"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert right["metrics"] == {"used_tool": 1.0} and right["tokens"] > 0
    assert "What is" in Path("kept/rollouts.html").read_text()
    (row,) = lines(Path("kept/metrics.jsonl"))
    assert row["groups_done"] == 3 and row["rollouts"] == 12
    assert 0 < row["reward"] < 1 and 0 < row["used_tool"] <= 1 and row["perf/tokens_per_second"] > 0


def test_a_game_of_several_turns_with_evaluations_in_between(gateway: RunningGateway) -> None:
    arrived = serve(
        *(gateway, "guess_the_number", "--groups", "2", "--group-size", "4"),
        *("--highest", "20", "--turns", "6", "--eval-every", "2", "--eval-items", "3"),
    )
    groups = arrived.complete_groups(4)
    assert len(groups) == 2
    for members in groups.values():
        rewards = [told.end.reward or 0.0 for told in members]
        best = next(told for told in members if told.end.reward == max(rewards))
        # The quickest got the bonus of `score`, which saw the whole group.
        assert max(rewards) == pytest.approx(1.1 - (len(best.steps) - 1) / 6)
        for told in members:
            assert [step.step_index for step in told.steps] == list(range(len(told.steps)))
            assert all(step.parent for step in told.steps[1:]), "each turn extends the last"
    assert any("eval/reward" in row for row in lines(Path("kept/metrics.jsonl")))
    check_evaluated(gateway, Path("kept/evaluate-after-2"), items=3, samples=1)


def test_code_is_scored_by_the_reward_worker(gateway: RunningGateway, tokenizer: Path) -> None:
    arrived = serve(gateway, "code_unit_tests", "--groups", "4", "--group-size", "2")
    groups = arrived.complete_groups(2)
    assert len(groups) == 4, "the whole data set, once"
    mine = {told.end.trajectory_uid: told for members in groups.values() for told in members}
    assert {told.end.reward for told in mine.values()} == {None}, "the environment scores nothing"
    options = ("--function", "unit_tests", "--tokenizer", str(tokenizer))
    with running_worker(gateway.connection, *options) as worker:
        wait_for(lambda: mine.keys() <= ends(gateway.connection).keys(), worker)
    rewards = {end.reward for uid, end in ends(gateway.connection).items() if uid in mine}
    assert 1.0 in rewards and len(rewards) > 1, "some code was right, some wrong"


def test_an_evaluation_never_reaches_the_channel_train(gateway: RunningGateway) -> None:
    said = run(
        *("arithmetic_tool", "evaluate", "--gateway", gateway.url),
        *("--eval-items", "4", "--eval-samples", "2"),
    )
    assert "reward_best" in said
    check_evaluated(gateway, Path("kept/evaluate"), items=4, samples=2)


def check_evaluated(gateway: RunningGateway, folder: Path, items: int, samples: int) -> None:
    told = json.loads((folder / "metrics.json").read_text())
    assert told["items"] == items and 0 <= told["metrics"]["reward"] <= 1.1
    arrived = RecordedLog(gateway.connection, prompts(folder / "samples.jsonl"))
    groups = arrived.complete_groups(samples, "val")
    assert len(groups) == items and not arrived.groups("train")
    for trajectory in arrived.trajectories.values():
        assert {step.channel for step in trajectory.steps} == {"val"}
