"""Two sets of rewards are compared: the numbers are those that a person would work out by hand."""

import json
import statistics
from collections.abc import Iterable, Mapping

import msgspec
import pytest
from pydantic import ValidationError
from rich.console import Console

from pool import topics
from pool.connection import Connection
from pool.core.groups import GroupRules
from pool.core.trajectories import StrayRecord, annotate
from pool.topics import REWARDED, STEPS
from replay.diff.command import compare, diff
from replay.diff.comparison import ChangedGroup, Comparer, Comparison, fill, signs
from replay.diff.paired_rewards import RewardPair, RewardPairs, Side, SideReward
from replay.diff.table import DiffTable
from replay.settings import DiffSettings
from schemas import Record, Reward, TrajectoryEnd
from servicekit.errors import Fatal
from tests.pool.log import write
from tests.pool.records import at, end, feedback, step, trajectory_of
from tests.steplog.command import reaching, steplog

OLD = {"a1": 0, "a2": 1, "b1": 1, "b2": 1, "c1": 0, "c2": 1, "d1": 0, "d2": 1, "e1": 1}
NEW = {"a1": 1, "a2": 0, "b1": 0, "b2": 1, "c1": 1, "c2": 1, "d1": 0, "d2": 1, "f1": 1}


def member(at: int, old: float | None, new: float | None, began: int | None = None) -> RewardPair:
    began = at - 1 if began is None else began
    return RewardPair(0, at, began, f"t{at}", "p", 2, SideReward(True, old), SideReward(True, new))


def test_a_trajectory_that_began_before_its_group_was_full_is_late() -> None:
    pairs = [member(2, 0, 0), member(4, 0, 0), member(6, 0, 0, began=3), member(9, 0, 0)]
    assert [[pair.offset for pair in group] for group in fill(pairs, 8)] == [[2, 4], [9]]


def test_signs_need_enough_members_and_rewards_that_differ() -> None:
    assert signs([SideReward(True, 1.0), SideReward(True, 0.0), None], 2) == [1, -1, 0]
    assert signs([SideReward(True, 1.0), SideReward(False, 0.0)], 2) == [0, 0]
    assert signs([SideReward(True, 1.0), SideReward(True, 1.0)], 2) == [0, 0]


def test_the_largest_changes_are_kept_and_no_more() -> None:
    comparer = Comparer(GroupRules(), limit=2)
    comparer.add([member(at, 0.0, at / 100) for at in range(1, 50)])
    found = comparer.comparison("old", "new", [])
    assert [one.offset for one in found.changed_trajectories] == [49, 48]
    assert sum(one.count for one in found.changes) == 49


def test_names_are_shown_as_they_are() -> None:
    comparer = Comparer(GroupRules(), limit=1)
    comparer.add([member(1, 0.0, 1.0)._replace(uid="[/b]x", prompt="[red]p")])
    console = Console(width=80)
    with console.capture() as capture:
        console.print(DiffTable(comparer.comparison("old", "new", [])))
    assert "[/b]x" in capture.get() and "[red]p" in capture.get()


def test_rewards_are_not_compared_with_themselves() -> None:
    with pytest.raises(ValidationError, match="give two different tags"):
        DiffSettings(rewards="a", with_="a")


def rewarded(records: Iterable[tuple[Record, object]], rewards: Mapping[str, int]) -> list[Record]:
    found: list[Record] = []
    for record, place in records:
        uid = record.trajectory_uid  # type: ignore[attr-defined]
        fields: dict[str, object] = {}
        if uid not in rewards:
            continue
        if isinstance(record, TrajectoryEnd):
            value = float(rewards[uid])
            fields = {"reward": value, "rewards": [Reward(name="f", version="1", value=value)]}
        found.append(annotate(record, place, **fields))  # type: ignore[arg-type]
    return found


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=2)
    topics.create_rewarded_topic(connection, "other")
    made: list[Record] = []
    for uid in sorted({*OLD, *NEW}):
        made += [step(f"{uid}-0", uid, uid[0]), end(uid, uid[0], group_size=2)]
    made.append(feedback(0.25, "d1", "d"))
    placed = list(zip(made, write(connection, STEPS, made), strict=True))
    write(connection, REWARDED, rewarded(placed, OLD))
    by_prompt = sorted(placed, key=lambda one: one[0].prompt_uid, reverse=True)  # type: ignore[attr-defined]
    write(connection, "rewarded.other", rewarded(by_prompt, NEW))
    return connection


def test_late_feedback_on_steps_counts_on_each_side() -> None:
    """On one side a function has scored the trajectory, on the other only its Steps have rewards."""
    pairs = RewardPairs()
    steps = [step("s"), step("z", index=1, reward=0.5), feedback(0.25, step_id="s")]
    late = StrayRecord(at(9, feedback(2.0, step_id="z")))
    copy_of_early = StrayRecord(at(10, feedback(0.25, step_id="s")))
    ends: dict[Side, Record] = {"old": end(steps=2, reward=1.0), "new": end(steps=2)}
    for side, ended in ends.items():
        for item in (trajectory_of(*steps, ended), late, copy_of_early):
            pairs.add(side, item)
    [[pair]] = pairs.by_prompt()
    assert (pair.old, pair.new) == (SideReward(True, 1.0), SideReward(True, 2.25))


@pytest.mark.broker
def test_the_numbers_of_a_log_made_by_hand(
    log: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare(DiffSettings(**log.model_dump(), with_="other"))
    assert (found.in_both, found.only_old, found.only_new) == (8, 1, 1)
    counted = (OLD | {"d1": 0.25}, NEW | {"d1": 0.25})
    old, new = ([float(side[uid]) for uid in OLD if uid in NEW] for side in counted)
    assert found.old.mean == pytest.approx(statistics.mean(old))
    assert found.new.spread == pytest.approx(statistics.pstdev(new))
    assert found.correlation == pytest.approx(statistics.correlation(old, new))
    assert {(one.low, one.count) for one in found.changes if one.count} == {
        (-1.0, 2),
        (-1e-6, 4),
        (1.0, 2),
    }
    assert (found.groups, found.trainable_old, found.trainable_new) == (6, 3, 3)
    assert (found.become_trainable, found.no_longer_trainable) == (1, 1)
    assert (found.change_sign, found.flipped) == (1, 2)
    changes = {group.prompt_uid: group.change for group in found.changed_groups}
    assert changes == {"b": "becomes trainable", "c": "is no longer trainable", "a": "changes sign"}
    assert {one.trajectory_uid for one in found.changed_trajectories} == {"a1", "a2", "b1", "c1"}
    assert [(f.side, f.name, f.version, f.rewards.count) for f in found.functions] == [
        ("old", "f", "1", 9),
        ("new", "f", "1", 9),
    ]
    diff(DiffSettings(**log.model_dump(), with_="other"), lambda line: None)
    told = capsys.readouterr().out
    assert "8 trajectories in both, 1 only in old, 1 only in new" in told
    assert "1 become trainable, 1 are no longer, 1 change sign (2 trajectories)" in told


@pytest.mark.broker
def test_a_range_is_one_of_steps_and_the_command_gives_json(log: Connection) -> None:
    words = [*reaching(log), "--with", "other", "--json", "--until", "4", "--limit", "1"]
    done = steplog("replay", "diff", *words)
    assert done.returncode == 0, done.stderr
    found = msgspec.convert(json.loads(done.stdout), Comparison)
    assert 0 < found.in_both < 8
    assert all(isinstance(group, ChangedGroup) for group in found.changed_groups)
    assert all(one.offset < 4 for one in found.changed_trajectories)
    assert len(found.changed_trajectories) == 1


@pytest.mark.broker
def test_rewards_that_are_not_there_are_one_sentence(log: Connection) -> None:
    with pytest.raises(Fatal, match=r"rewarded\.missing not found"):
        compare(DiffSettings(**log.model_dump(), with_="missing"))
