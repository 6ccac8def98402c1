from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pool.core.group_assembler import LATE, GroupAssembler
from pool.core.groups import TRAIN, Group, GroupRules, Judgement, UngroupedTrajectory, judge_member
from pool.core.progress import Received
from pool.core.trajectories import (
    StrayRecord,
    Trajectory,
    TrajectoryAssembler,
    annotate,
    source_position,
)
from schemas import DecidedGroup, Feedback, Record
from tests.pool.histories import Histories, copies_of, histories, merged, placed
from tests.pool.records import FAR, at, copied, end, feed, feedback, group_of, log, run_of, step

PAIRS = GroupRules(group_size=2)


def uids(group: Group) -> list[str]:
    return list(group.members)


def groups_in(items: Sequence[Group | UngroupedTrajectory | StrayRecord]) -> list[list[str]]:
    return [uids(item) for item in items if isinstance(item, Group)]


def judged(group: Group, rules: GroupRules = PAIRS) -> DecidedGroup:
    return group.judge(rules, judge_member)


def verdicts(group: Group) -> dict[str, str]:
    return {member.trajectory_uid: member.verdict for member in judged(group).members}


# Names


def test_a_group_is_named_by_its_prompt_and_the_offset_in_steps_of_its_first_record() -> None:
    assembler = GroupAssembler(PAIRS)
    first, second = run_of("a"), run_of("b")
    items = feed(
        assembler,
        [
            copied(900, first[0], 40),
            copied(901, first[1], 43),
            copied(902, second[0], 38),  # began first, and was scored last
            copied(903, second[1], 44),
        ],
    )
    [group] = items
    assert isinstance(group, Group)
    assert group.id == ("p", 38)
    assert group.first_offset == 900
    assert judged(group).first_offset == 38


def test_a_prompt_that_comes_back_makes_another_group() -> None:
    items = feed(GroupAssembler(PAIRS), log(*run_of("a"), *run_of("b"), *run_of("c"), *run_of("d")))
    assert [(item.id, uids(item)) for item in items if isinstance(item, Group)] == [
        (("p", 0), ["a", "b"]),
        (("p", 4), ["c", "d"]),
    ]


# Closing


def test_a_group_closes_when_group_size_trajectories_have_ended() -> None:
    assembler = GroupAssembler(GroupRules(group_size=3))
    assert feed(assembler, log(*run_of("a"), *run_of("b"), step("c", "c"))) == []
    assert groups_in(feed(assembler, [at(5, end("c", reward=0.0))])) == [["a", "b", "c"]]


def test_the_group_size_is_what_its_records_say_else_the_settings() -> None:
    by_end = feed(GroupAssembler(), log(*run_of("a", group_size=2), *run_of("b")))
    assert groups_in(by_end) == [["a", "b"]]
    by_step = log(step("s", "a", group_size=1), end("a", reward=1.0))
    assert groups_in(feed(GroupAssembler(), by_step)) == [["a"]]
    by_settings = log(*(record for n in range(8) for record in run_of(f"t{n}")))
    assert groups_in(feed(GroupAssembler(), by_settings)) == [[f"t{n}" for n in range(8)]]


def test_failed_members_count_as_ended() -> None:
    items = feed(
        GroupAssembler(PAIRS), log(*run_of("a"), *run_of("b", reward=None, status="failed"))
    )
    assert groups_in(items) == [["a", "b"]]


def test_a_group_stays_open_while_a_reward_is_expected() -> None:
    assembler = GroupAssembler(PAIRS)
    waiting = run_of("a", reward=None, reward_expected=True)
    assert feed(assembler, log(*waiting, *run_of("b"))) == []
    assert groups_in(feed(assembler, [at(4, feedback(0.5, "a"))])) == [["a", "b"]]


def test_feedback_before_the_end_is_the_expected_reward() -> None:
    early = [step("s", "a"), feedback(0.5, "a"), end("a", reward_expected=True)]
    assert groups_in(feed(GroupAssembler(PAIRS), log(*early, *run_of("b")))) == [["a", "b"]]


def test_the_expected_reward_may_be_one_for_each_step() -> None:
    steps = [step("a-0", "a"), step("a-1", "a", index=1)]
    waiting = [*steps, end("a", steps=2, reward_expected=True)]
    assembler = GroupAssembler(PAIRS)
    on_one_step = feedback(0.5, "a", step_id="a-0")
    assert feed(assembler, log(*waiting, *run_of("b"), on_one_step)) == []
    [group] = feed(assembler, [at(6, feedback(0.25, "a", step_id="a-1"))])
    assert isinstance(group, Group)
    assert group.reward(group.members["a"]) == 0.75


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_a_group_does_not_wait_for_the_reward_of_a_member_that_cannot_be_trained(
    status: str,
) -> None:
    lost = run_of("a", reward=None, status=status, reward_expected=True)
    assert groups_in(feed(GroupAssembler(PAIRS), log(*lost, *run_of("b")))) == [["a", "b"]]


def test_a_group_does_not_wait_for_a_reward_that_nobody_expects() -> None:
    items = feed(GroupAssembler(PAIRS), log(*run_of("a"), *run_of("b", reward=None)))
    assert groups_in(items) == [["a", "b"]]


def test_closing_one_group_never_waits_for_another() -> None:
    assembler = GroupAssembler(PAIRS)
    open_for_ever = run_of("a", "p", reward=None, reward_expected=True)
    items = feed(assembler, log(*open_for_ever, *run_of("c", "q"), *run_of("d", "q")))
    assert groups_in(items) == [["c", "d"]]
    assert [uids(group) for group in assembler.open_groups()] == [["a"]]


def test_time_alone_closes_nothing() -> None:
    assembler = GroupAssembler(PAIRS)
    feed(assembler, log(*run_of("a")))
    assert [uids(group) for group in assembler.overdue(FAR)] == [["a"]]
    assert feed(assembler, [at(10**6, step("s", "b"))]) == []
    assert groups_in(feed(assembler, [at(10**6 + 1, end("b", reward=0.0))])) == [["a", "b"]]


# Deadlines


def test_a_group_is_overdue_at_the_deadline_of_its_steps() -> None:
    assembler = GroupAssembler(PAIRS)
    feed(assembler, log(step("s", "a", deadline=5_000, created_at=1), end("a")))
    assert assembler.overdue(4_999) == []
    assert [uids(group) for group in assembler.overdue(5_000)] == [["a"]]


def test_without_a_deadline_it_is_counted_from_its_first_record() -> None:
    assembler = GroupAssembler(GroupRules(group_size=3, deadline=60.0))
    feed(assembler, log(step("s", "a", created_at=7_000), end("a", created_at=90_000)))
    feed(assembler, log(step("s", "b", created_at=1_000), end("b", created_at=90_000), first=2))
    assert assembler.overdue(60_999) == []
    assert [uids(group) for group in assembler.overdue(61_000)] == [["a", "b"]]


def test_a_group_without_steps_has_its_deadline_too() -> None:
    assembler = GroupAssembler(GroupRules(group_size=2, deadline=60.0))
    feed(assembler, log(end("a", steps=0, status="failed", created_at=1_000)))
    assert assembler.overdue(60_999) == []
    assert len(assembler.overdue(61_000)) == 1


def test_a_decision_closes_an_overdue_group_with_what_it_has() -> None:
    assembler = GroupAssembler(PAIRS)
    feed(assembler, log(*run_of("a", "p"), *run_of("x", "q")))
    [group] = [group for group in assembler.overdue(FAR) if group.prompt_uid == "p"]
    assembler.close(group)
    # The newest End that was read is that of `x`, at offset 3.
    assert (uids(group), group.closed_at) == (["a"], 4)
    assert judged(group).verdict == "too_few"


def test_who_began_before_an_overdue_group_was_closed_is_late() -> None:
    assembler = GroupAssembler(PAIRS)
    feed(assembler, log(*run_of("a"), step("b-0", "b"), *run_of("x", "q")))
    [group] = [group for group in assembler.overdue(FAR) if group.prompt_uid == "p"]
    assembler.close(group)
    [late] = feed(assembler, [at(5, end("b", reward=1.0))])
    assert isinstance(late, UngroupedTrajectory)
    assert (late.trajectory.uid, late.verdict) == ("b", "late")


def test_an_overdue_group_waits_while_an_earlier_one_of_its_prompt_is_undecided() -> None:
    assembler = GroupAssembler(PAIRS)
    [first] = feed(assembler, log(*run_of("a"), *run_of("b"), *run_of("c")))
    assert isinstance(first, Group)
    assert assembler.overdue(FAR) == []
    assembler.decide(first, 6)
    assert [uids(group) for group in assembler.overdue(FAR)] == [["c"]]


def test_groups_of_one_prompt_are_decided_in_the_order_in_which_they_closed() -> None:
    assembler = GroupAssembler(GroupRules(group_size=1))
    first, second = feed(assembler, log(*run_of("a"), *run_of("b")))
    assert isinstance(first, Group)
    assert isinstance(second, Group)
    with pytest.raises(AssertionError, match="an earlier group is undecided"):
        assembler.decide(second, 4)
    assembler.decide(first, 4)
    assembler.decide(second, 4)


def test_what_was_read_before_an_overdue_group_began_does_not_say_where_it_closes() -> None:
    """A rebuild begins at the group, and must close it at the same place."""
    assembler = GroupAssembler(PAIRS)
    x, a = run_of("x", "q"), run_of("a")
    feed(assembler, [copied(0, x[0], 900), copied(1, x[1], 1_000)])
    feed(assembler, [copied(2, a[0], 10), copied(3, a[1], 11)])
    [group] = [group for group in assembler.overdue(FAR) if group.prompt_uid == "p"]
    assembler.close(group)
    assert group.closed_at == 12


def test_a_late_end_says_where_an_overdue_group_closes_like_any_other() -> None:
    """A rebuild may not know the trajectory that it ended."""
    assembler = GroupAssembler(PAIRS)
    feed(assembler, log(*run_of("a"), end("unknown", "q", steps=3)))
    [group] = assembler.overdue(FAR)
    assembler.close(group)
    assert group.closed_at == 3


# Late


def test_a_trajectory_that_began_before_its_group_closed_is_late() -> None:
    began_early = log(step("c-0", "c"), *run_of("a"), *run_of("b"), end("c", reward=1.0))
    group, late = feed(GroupAssembler(PAIRS), began_early)
    assert isinstance(group, Group)
    assert uids(group) == ["a", "b"]
    assert isinstance(late, UngroupedTrajectory)
    assert (late.trajectory.uid, late.verdict, late.reason) == ("c", "late", LATE)
    assert late.member().offsets == [0, 5]
    assert late.first_offset == 0


def test_a_trajectory_that_began_after_its_group_closed_opens_the_next() -> None:
    assembler = GroupAssembler(PAIRS)
    feed(assembler, log(*run_of("a"), *run_of("b"), *run_of("c")))
    assert [uids(group) for group in assembler.open_groups()] == [["c"]]


def test_a_group_that_closes_by_feedback_closes_there() -> None:
    waiting = run_of("a", reward=None, reward_expected=True)
    before = log(*waiting, *run_of("b"), step("c-0", "c"), feedback(0.5, "a"), step("d-0", "d"))
    assembler = GroupAssembler(PAIRS)
    assert groups_in(feed(assembler, before)) == [["a", "b"]]
    [late] = feed(assembler, log(end("c", reward=1.0), end("d", reward=1.0), first=7))
    assert isinstance(late, UngroupedTrajectory)
    assert late.trajectory.uid == "c"
    assert [uids(group) for group in assembler.open_groups()] == [["d"]]


def test_offsets_in_steps_say_who_is_late_wherever_they_are_read() -> None:
    assembler = GroupAssembler(PAIRS)
    a, b, c, d = run_of("a"), run_of("b"), run_of("c"), run_of("d")
    feed(assembler, [copied(0, a[0], 10), copied(1, a[1], 13)])
    feed(assembler, [copied(2, b[0], 11), copied(3, b[1], 15)])
    items = feed(assembler, [copied(4, c[0], 14), copied(5, c[1], 30)])
    assert [item.verdict for item in items if isinstance(item, UngroupedTrajectory)] == ["late"]
    assert feed(assembler, [copied(6, d[0], 16), copied(7, d[1], 31)]) == []


def test_a_second_trajectory_with_the_uid_of_a_member_is_late() -> None:
    assembler = GroupAssembler(PAIRS, memory=0)
    items = feed(assembler, log(*run_of("a"), step("other", "x", "q"), *run_of("a")))
    assert [item.verdict for item in items if isinstance(item, UngroupedTrajectory)] == ["late"]
    assert [uids(group) for group in assembler.open_groups()] == [["a"]]


def test_what_repeats_a_member_stays_late_when_the_group_is_closed() -> None:
    assembler = GroupAssembler(PAIRS, memory=0)
    a, b = run_of("a", reward=None, reward_expected=True), run_of("b")
    feed(assembler, [copied(0, a[0], 10), copied(1, a[1], 11)])
    feed(assembler, [copied(2, b[0], 12), copied(3, b[1], 13)])
    feed(assembler, [copied(4, a[0], 50), copied(5, a[1], 51)])
    [group] = feed(assembler, [copied(6, feedback(0.5, "a"), 20)])
    assert isinstance(group, Group)
    assert group.closed_at == 52


def test_a_late_step_is_no_member() -> None:
    items = feed(GroupAssembler(PAIRS), log(*run_of("a"), step("a-1", "a"), *run_of("b")))
    assert [item.verdict for item in items if isinstance(item, StrayRecord)] == ["late"]
    assert groups_in(items) == [["a", "b"]]


def test_another_channel_belongs_to_no_group() -> None:
    assembler = GroupAssembler(PAIRS)
    [item] = feed(assembler, log(*run_of("a", channel="val"), *run_of("b")))
    assert isinstance(item, UngroupedTrajectory)
    assert (item.verdict, item.reason) == ("other_channel", "its channel is val")
    assert [uids(group) for group in assembler.open_groups()] == [["b"]]


# Rewards


def test_what_is_not_selected_is_as_if_it_were_not_there() -> None:
    assembler = GroupAssembler(PAIRS, selects=lambda trajectory: trajectory.uid != "b")
    items = feed(assembler, log(*run_of("a"), *run_of("b"), *run_of("c")))
    assert groups_in(items) == [["a", "c"]]
    assert len(items) == 1 and assembler.has_undecided()


def closed_pair() -> tuple[GroupAssembler, Group]:
    assembler = GroupAssembler(PAIRS)
    [group] = feed(assembler, log(*run_of("a", reward=0.25), *run_of("b", reward=0.0)))
    assert isinstance(group, Group)
    return assembler, group


def test_without_feedback_the_reward_is_what_the_end_says() -> None:
    _, group = closed_pair()
    assert group.reward(group.members["a"]) == 0.25


def test_feedback_counts_until_the_group_is_decided() -> None:
    assembler, group = closed_pair()
    assert feed(assembler, [at(4, feedback(0.75, "a"))]) == []
    assert group.reward(group.members["a"]) == 0.75
    assert group.reward(group.members["b"]) == 0.0
    assembler.decide(group, 5)
    [late] = feed(assembler, [at(5, feedback(0.9, "a"))])
    assert isinstance(late, StrayRecord)
    assert late.verdict == "late"
    assert group.reward(group.members["a"]) == 0.75


def test_the_last_feedback_by_offset_wins() -> None:
    early = [step("s", "a"), feedback(0.1, "a"), feedback(0.2, "a"), end("a", reward=1.0)]
    group = group_of(*early, *run_of("b"))
    assert group.reward(group.members["a"]) == 0.2


def test_the_last_feedback_by_offset_in_steps_wins_wherever_it_is_read() -> None:
    assembler, group = closed_pair()
    feed(assembler, [copied(4, feedback(0.9, "a"), 8), copied(5, feedback(0.1, "a"), 7)])
    assert group.reward(group.members["a"]) == 0.9


def test_a_copy_of_old_feedback_does_not_undo_newer_feedback() -> None:
    assembler = GroupAssembler(PAIRS)
    early = [step("s", "a"), feedback(0.1, "a"), end("a", reward=1.0)]
    [group] = feed(assembler, log(*early, *run_of("b")))
    assert isinstance(group, Group)
    again = log(feedback(0.2, "a"), feedback(0.3, "a"), feedback(0.2, "a"), feedback(0.1, "a"))
    feed(assembler, [at(5 + n, received.record) for n, received in enumerate(again)])
    assert group.reward(group.members["a"]) == 0.3


def test_feedback_counts_in_the_newest_group_that_has_its_trajectory() -> None:
    """The older one may be decided: then a rebuild does not have it."""
    assembler = GroupAssembler(GroupRules(group_size=1), memory=0)
    items = feed(
        assembler, log(*run_of("a"), step("x", "x", "q"), *run_of("a"), feedback(0.5, "a"))
    )
    older, newer = [item for item in items if isinstance(item, Group)]
    assert (older.reward(older.members["a"]), newer.reward(newer.members["a"])) == (1.0, 0.5)


def test_feedback_on_one_step_does_not_replace_the_reward_of_the_trajectory() -> None:
    assembler, group = closed_pair()
    feed(assembler, [at(4, feedback(0.75, "a", step_id="a-0"))])
    assert group.reward(group.members["a"]) == 0.25


def test_a_member_that_has_only_rewards_of_steps_is_trained() -> None:
    assembler = GroupAssembler(PAIRS)
    rated = [step("a-0", "a"), feedback(0.5, "a", step_id="a-0"), end("a")]
    [group] = feed(assembler, log(*rated, *run_of("b", reward=None)))
    assert isinstance(group, Group)
    feed(assembler, [at(5, feedback(0.25, "b", step_id="b-0"))])
    assert (group.reward(group.members["a"]), group.reward(group.members["b"])) == (0.5, 0.25)
    assert verdicts(group) == {"a": "train", "b": "train"}


def test_a_decision_names_every_record_that_made_its_rewards() -> None:
    assembler, group = closed_pair()
    feed(assembler, log(feedback(0.75, "a"), feedback(0.5, "b"), feedback(0.6, "a"), first=4))
    offsets = {member.trajectory_uid: member.offsets for member in judged(group).members}
    assert offsets == {"a": [0, 1, 4, 6], "b": [2, 3, 5]}


@pytest.mark.parametrize("status", ["expired", "failed", "cancelled"])
@pytest.mark.parametrize("again", [(), (end("b", end_id="again", reward=1.0),)])
def test_feedback_never_changes_how_a_trajectory_ended(
    status: str, again: Sequence[Record]
) -> None:
    """Whether its End was written once or twice, and whether the Feedback came before the second."""
    for first, second in [([0.5], []), ([0.25], [0.5]), ([], [0.5])]:
        log_of_b = [
            step("b-0", "b"),
            end("b", status=status),
            *(feedback(reward, "b") for reward in first),
            *again,
            *(feedback(reward, "b") for reward in second),
        ]
        assembler = GroupAssembler(PAIRS)
        [group] = [
            item
            for item in feed(assembler, log(*log_of_b[:2], *run_of("a")))
            if isinstance(item, Group)
        ]
        strays = feed(assembler, log(*log_of_b[2:], first=4))
        assert all(isinstance(item, StrayRecord) for item in strays) and len(strays) == len(again)
        assert group.reward(group.members["b"]) == 0.5
        assert verdicts(group)["b"] == ("expired" if status == "expired" else "invalid")


# Verdicts


def test_a_group_of_usable_members_is_trained() -> None:
    _, group = closed_pair()
    decided = judged(group)
    assert (decided.verdict, decided.closed_at, decided.partition) == ("train", 3, 0)
    assert verdicts(group) == {"a": "train", "b": "train"}


@pytest.mark.parametrize(
    ("fields", "verdict", "reason"),
    [
        ({"status": "expired"}, "expired", "its deadline passed"),
        ({"status": "failed", "reason": "no disk"}, "invalid", "failed: no disk"),
        ({"status": "cancelled"}, "invalid", "cancelled: no reason given"),
        ({"steps": 2}, "invalid", "its End counts 2 Steps, and 1 are in the log"),
        ({"reward": None}, "invalid", "it has no reward"),
        ({"status": "truncated"}, "train", ""),
    ],
)
def test_what_a_member_needs_to_be_usable(
    fields: dict[str, Any], verdict: str, reason: str
) -> None:
    group = group_of(*run_of("a"), step("b-0", "b"), end("b", **{"reward": 1.0, **fields}))
    assert judge_member(group, group.members["b"]) == (verdict, reason)


def test_a_member_without_steps_is_invalid() -> None:
    group = group_of(*run_of("a"), end("b", steps=0, reward=1.0))
    assert judge_member(group, group.members["b"]) == ("invalid", "it has no Steps")


def test_failed_members_leave_the_group_and_are_never_scored_zero() -> None:
    members = [*run_of("a"), *run_of("b"), *run_of("c", reward=None, status="failed")]
    group = group_of(*members, size=3)
    assert group.reward(group.members["c"]) is None
    assert judged(group).verdict == "train"
    assert verdicts(group) == {"a": "train", "b": "train", "c": "invalid"}


@pytest.mark.parametrize(
    ("size", "quorum", "wanted"),
    [
        (2, 0.5, 2),  # never fewer than two
        (8, 0.1, 2),
        (8, 0.5, 4),
        (7, 0.5, 4),  # 3.5
        (8, 1.0, 8),
        (25, 0.28, 7),  # 7.000000000000001 in floats
    ],
)
def test_a_group_needs_its_quorum_and_at_least_two(size: int, quorum: float, wanted: int) -> None:
    group = group_of(*(r for n in range(size) for r in run_of(f"t{n}")), size=size)

    def verdict(usable: int) -> str:
        fine = set(list(group.members)[:usable])
        rules = GroupRules(quorum=quorum)
        return group.judge(
            rules, lambda _, member: TRAIN if member.uid in fine else Judgement("stale")
        ).verdict

    assert verdict(wanted) == "train"
    assert verdict(wanted - 1) == "too_few"


def test_too_few_says_how_many_there_were() -> None:
    group = group_of(*run_of("a"), *run_of("b", reward=None, status="failed"))
    assert judged(group).reason == "1 of 2 are usable, 2 are needed"


# Decided groups


def test_stragglers_of_a_group_that_an_earlier_life_decided_are_late() -> None:
    _, group = closed_pair()
    assembler = GroupAssembler(PAIRS, decided=[(judged(group), 4)])
    [late] = feed(assembler, [copied(4, step("c", "c"), 2), copied(5, end("c"), 9)])
    assert isinstance(late, UngroupedTrajectory)
    assert late.verdict == "late"


def test_what_a_decision_names_is_done_when_it_is_read_again() -> None:
    """Also from the beginning: the ledger outranks the offsets of the consumer group."""
    assembler = GroupAssembler(PAIRS)
    records = log(step("c-0", "c"), *run_of("a"), *run_of("b"), end("c", reward=1.0))
    group, late = feed(assembler, records)
    assert isinstance(group, Group)
    assert isinstance(late, UngroupedTrajectory)
    again = GroupAssembler(PAIRS, decided=[(judged(group), 6)], others=[late.member()])
    assert feed(again, records) == []
    assert again.open_groups() == []


def test_a_part_of_a_decided_trajectory_does_not_open_a_group() -> None:
    """A rebuild may begin between two Steps of a trajectory that was late and is done."""
    records = log(step("c-0", "c"), *run_of("a"), *run_of("b"), step("c-1", "c"), end("c", steps=2))
    group, late = feed(GroupAssembler(PAIRS), records)
    assert isinstance(group, Group)
    assert isinstance(late, UngroupedTrajectory)
    again = GroupAssembler(PAIRS, decided=[(judged(group), 7)], others=[late.member()])
    assert feed(again, records[5:]) == []
    assert again.open_groups() == []


def test_the_state_of_a_group_needs_its_oldest_record_until_it_is_decided() -> None:
    assembler = GroupAssembler(PAIRS)
    [group] = feed(assembler, log(*run_of("a"), *run_of("b"), step("s", "x", "q"), first=5))
    assert isinstance(group, Group)
    assert assembler.oldest_open() == 5
    assembler.decide(group, 10)
    assert assembler.oldest_open() == 9


def test_forgetting_drops_every_group_and_trajectory_that_began_before() -> None:
    assembler = GroupAssembler(PAIRS)
    closed = [*run_of("a", "p"), *run_of("b", "p")]
    kept = [*run_of("d", "r"), step("e", "e", "r")]
    feed(assembler, log(step("x", "x", "q"), *closed, *run_of("c", "q"), *kept))
    assembler.forget_before(7)
    assert [uids(group) for group in assembler.open_groups()] == [["d"]]
    assert assembler.oldest_open() == 7
    late = feed(assembler, log(feedback(1.0, "a"), end("x", "q"), first=10))
    assert [item.verdict for item in late if isinstance(item, StrayRecord)] == ["late", "late"]


# Any order of the same records gives the same groups


def seen(group: Group) -> tuple[object, ...]:
    """Everything about a group but its offsets."""
    members = [
        (
            member.uid,
            [getattr(received.record, "step_id", "") for received in member.steps],
            sorted(member.orphans),
            group.reward(member),
            judge_member(group, member),
        )
        for member in group.members.values()
    ]
    verdict = "open" if group.closed_at is None else judged(group).verdict
    return group.prompt_uid, group.size, verdict, members


def result(received: Sequence[Received]) -> dict[str, list[tuple[object, ...]]]:
    """Groups and outsiders of every prompt, in order."""
    assembler = GroupAssembler(PAIRS)
    items = feed(assembler, received)
    found: dict[str, list[tuple[object, ...]]] = {}
    for group in (*(i for i in items if isinstance(i, Group)), *assembler.open_groups()):
        found.setdefault(group.prompt_uid, []).append(seen(group))
    for outsider in (item for item in items if isinstance(item, UngroupedTrajectory)):
        named = (outsider.trajectory.uid, outsider.verdict, outsider.reason)
        found.setdefault(outsider.trajectory.prompt_uid, []).append(named)
    return found


THOROUGH = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@THOROUGH
@given(histories(), st.data())
def test_any_interleaving_of_prompts_gives_the_same_groups(
    prompts: Histories, data: st.DataObject
) -> None:
    one_after_the_other = placed(data.draw, [record for records in prompts for record in records])
    interleaved = placed(data.draw, merged(data.draw, prompts))
    assert result(interleaved) == result(one_after_the_other)


@THOROUGH
@given(histories(), st.data())
def test_copies_of_records_change_no_group(prompts: Histories, data: st.DataObject) -> None:
    records = merged(data.draw, prompts)
    with_copies = copies_of(data.draw, records)
    assert result(placed(data.draw, with_copies)) == result(placed(data.draw, records))


@THOROUGH
@given(histories(), st.data())
def test_groups_are_the_same_read_from_steps_and_from_rewarded(
    prompts: Histories, data: st.DataObject
) -> None:
    steps = placed(data.draw, merged(data.draw, prompts))
    assert result(rewarded(steps)) == result(steps)


def rewarded(steps: Sequence[Received]) -> list[Received]:
    """What a reward worker writes: whole trajectories one after the other, and Feedback."""
    copies: list[Record] = []
    for item in feed(TrajectoryAssembler(), steps):
        if isinstance(item, Trajectory):
            copies += [
                annotate(received.record, source_position(received)) for received in item.records
            ]
        elif isinstance(item.received.record, Feedback):
            copies.append(annotate(item.received.record, source_position(item.received)))
    return log(*copies)
