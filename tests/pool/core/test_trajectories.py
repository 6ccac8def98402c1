import pytest

from pool.core.trajectories import StrayReason, StrayRecord, Trajectory, TrajectoryAssembler
from schemas import Position, Record, ScoredGroup
from tests.pool.records import (
    at,
    child,
    copied,
    end,
    feed,
    feedback,
    log,
    note,
    step,
    trajectory_of,
)

LONG = list(range(20))
"""Long enough for a delta."""
ASKED = b"the same request"


def step_ids(trajectory: Trajectory) -> list[str]:
    return [getattr(received.record, "step_id", "") for received in trajectory.steps]


def verdicts(items: list[Trajectory | StrayRecord]) -> list[str | None]:
    return ["whole" if isinstance(item, Trajectory) else item.verdict for item in items]


def answers(*step_ids: str) -> list[Record]:
    """Steps that answer the same request, each with a response of its own."""
    return [
        step(step_id, ids=LONG, response=[100 + n, 200], request_hash=ASKED)
        for n, step_id in enumerate(step_ids)
    ]


# Identity and order


def test_only_equal_step_ids_are_the_same_step() -> None:
    whole = trajectory_of(step("a"), step("b"), step("a"), step("b"), end(steps=2))
    assert step_ids(whole) == ["a", "b"]
    assert [received.offset for received in whole.records] == [0, 1, 4]


def test_of_equal_step_ids_the_first_by_offset_counts() -> None:
    whole = trajectory_of(step("a", response=[1]), step("a", response=[2]), end())
    assert whole.steps[0].record == step("a", response=[1])


def test_steps_are_ordered_by_step_index_and_ties_by_offset() -> None:
    whole = trajectory_of(
        step("c", index=2),
        step("a", index=0),
        step("b2", index=1),
        step("b1", index=1),
        end(steps=4),
    )
    assert step_ids(whole) == ["a", "b2", "b1", "c"]


def test_ties_are_ordered_by_offset_in_steps_wherever_they_are_read() -> None:
    copies = [copied(0, step("b"), 8), copied(1, step("a"), 7), copied(2, end(steps=2), 9)]
    [whole] = feed(TrajectoryAssembler(), copies)
    assert isinstance(whole, Trajectory)
    assert step_ids(whole) == ["a", "b"]
    assert whole.began == Position(partition=0, offset=7)
    assert whole.ended == Position(partition=0, offset=9)
    assert whole.first_offset == 0


def test_step_indexes_may_have_gaps() -> None:
    whole = trajectory_of(step("a", index=0), step("b", index=5), end(steps=2))
    assert whole.problem is None


def test_trajectories_do_not_mix() -> None:
    items = feed(
        TrajectoryAssembler(),
        log(step("a", "t1"), step("a", "t2"), step("b", "t1"), end("t2"), end("t1", steps=2)),
    )
    assert [(item.uid, step_ids(item)) for item in items if isinstance(item, Trajectory)] == [
        ("t2", ["a"]),
        ("t1", ["a", "b"]),
    ]


# The End


def test_silence_does_not_close_a_trajectory() -> None:
    assembler = TrajectoryAssembler()
    assert feed(assembler, log(step("a", is_last=True))) == []
    assert feed(assembler, [at(10**9, step("b"))]) == []
    assert [uid for uid, _ in assembler.open_trajectories()] == ["t"]


def test_the_first_end_wins_and_later_steps_notes_and_ends_are_late() -> None:
    first, second = end(status="truncated"), end(status="completed", end_id="another")
    items = feed(
        TrajectoryAssembler(), log(step("a"), first, step("b"), note("a", True), second, step("a"))
    )
    assert verdicts(items) == ["whole", "late", "late", "late", "late"]
    assert isinstance(items[0], Trajectory)
    assert items[0].end == first


def test_an_expired_end_closes_like_any_other() -> None:
    items = feed(TrajectoryAssembler(), log(step("a"), end(status="expired"), end()))
    assert verdicts(items) == ["whole", "late"]


def test_a_trajectory_without_steps_is_its_end() -> None:
    whole = trajectory_of(end(steps=0, status="failed"))
    assert (whole.steps, whole.first_offset, whole.problem) == ([], 0, None)


def test_an_end_that_counts_steps_of_a_trajectory_that_is_not_open_is_late() -> None:
    [item] = feed(TrajectoryAssembler(), log(end(steps=1)))
    assert item == StrayRecord(at(0, end(steps=1)), "late", StrayReason.TRAJECTORY_NOT_OPEN)


def test_a_trajectory_is_whole_with_as_many_distinct_steps_as_its_end_says() -> None:
    assert trajectory_of(step("a"), step("b"), end(steps=2)).problem is None


def test_more_steps_than_the_end_says_were_acknowledged_by_another_process() -> None:
    assert trajectory_of(step("a"), step("b"), end(steps=1)).problem is None


def test_a_hole_makes_the_trajectory_invalid_and_still_closes_it() -> None:
    whole = trajectory_of(step("a"), step("a"), end(steps=2))
    assert whole.problem == "its End counts 2 Steps, and 1 are in the log"


# Prompts


def test_readers_get_full_prompts() -> None:
    first = step("a", ids=LONG, response=[30])
    second = child("b", first, [*LONG, 30], [31])
    third = child("c", second, [*LONG, 30, 31, 8, 9], [32])
    whole = trajectory_of(first, second, third, end(steps=3))
    assert whole.problem is None
    assert whole.prompts["c"] == step("c", ids=[*LONG, 30, 31, 8, 9, 32]).prompt_ids


def test_a_missing_parent_makes_the_trajectory_invalid() -> None:
    unwritten = step("unwritten", ids=LONG, response=[30])
    whole = trajectory_of(step("a"), child("b", unwritten, [*LONG, 30], [31]), end(steps=2))
    assert whole.problem == "step b extends unwritten, which is not in the log"


def test_a_prefix_that_differs_makes_the_trajectory_invalid() -> None:
    first = step("a", ids=LONG, response=[30])
    whole = trajectory_of(first, child("b", first, [*LONG, 99], [31]), end(steps=2))
    assert whole.problem == "step b extends other ids than those of a in the log"


def test_a_parent_precedes_its_child_by_offset_whatever_their_indexes_say() -> None:
    first = step("a", ids=LONG, response=[30], index=9)
    second = child("b", step("a", index=0), [*LONG, 30], [31])
    whole = trajectory_of(first, second, end(steps=2))
    assert step_ids(whole) == ["b", "a"]
    assert whole.problem is None


# Orphans


def test_delivered_answers_are_samples_however_often_their_request_is_repeated() -> None:
    """Agents that vote, or that meet the same observation twice, keep all their Steps."""
    assert trajectory_of(*answers("a", "b", "c"), end(steps=3)).orphans == frozenset()


def test_an_answer_that_was_not_delivered_is_an_orphan_if_an_equal_request_follows() -> None:
    first, second = answers("a", "b")
    assert trajectory_of(first, note("a", False), second, end(steps=2)).orphans == {"a"}


def test_an_answer_that_was_not_delivered_is_an_orphan_if_nothing_follows() -> None:
    undelivered = [note("a", False), note("b", False)]
    assert trajectory_of(*answers("a", "b"), *undelivered, end(steps=2)).orphans == {"a", "b"}


def test_an_undelivered_answer_that_a_later_step_extends_is_a_sample() -> None:
    """The client had all of it when its connection broke."""
    first, second = answers("a", "b")
    third = step("c", index=1, ids=[*LONG, 100, 200, 7])  # goes on where `a` ended
    whole = trajectory_of(first, note("a", False), second, note("b", False), third, end(steps=3))
    assert whole.orphans == {"b"}


def test_a_step_that_precedes_an_answer_does_not_extend_it() -> None:
    earlier = step("c", ids=[*LONG, 100, 200, 7])
    [answer] = answers("a")
    assert trajectory_of(earlier, answer, note("a", False), end(steps=2)).orphans == {"a"}


def test_of_equal_answers_the_delivered_one_is_extended() -> None:
    first, second = (step(uid, ids=LONG, response=[100], request_hash=ASKED) for uid in "ab")
    third = step("c", index=1, ids=[*LONG, 100, 7])
    whole = trajectory_of(first, note("a", False), second, third, end(steps=3))
    assert whole.orphans == {"a"}


def test_of_equal_undelivered_answers_the_last_is_extended() -> None:
    first, second = (step(uid, ids=LONG, response=[100], request_hash=ASKED) for uid in "ab")
    third = step("c", index=1, ids=[*LONG, 100, 7])
    notes = [note("a", False), note("b", False)]
    assert trajectory_of(first, second, *notes, third, end(steps=3)).orphans == {"a"}


def test_a_note_is_cleared_when_a_retry_is_served() -> None:
    notes = [note("b", False), note("b", True)]
    assert trajectory_of(*answers("a", "b"), *notes, end(steps=2)).orphans == frozenset()


def test_a_copy_of_an_old_note_does_not_undo_a_newer_one() -> None:
    notes = [note("b", False), note("b", True), note("b", False)]
    whole = trajectory_of(*answers("a", "b"), *notes, end(steps=2))
    assert whole.orphans == frozenset()
    assert [received.offset for received in whole.records] == [0, 1, 2, 3, 5]


def test_an_answer_without_tokens_is_not_extended_by_another_answer() -> None:
    empty = step("a", ids=LONG, response=[], request_hash=ASKED)
    delivered = step("b", ids=LONG, response=[100], request_hash=ASKED)
    assert trajectory_of(empty, delivered, note("a", False), end(steps=2)).orphans == {"a"}


def test_an_orphan_stays_a_valid_parent() -> None:
    first, second = answers("a", "b")
    branch = child("c", step("a"), [*LONG, 100, 200][:20], [7])
    whole = trajectory_of(first, note("a", False), second, branch, end(steps=3))
    assert whole.orphans == {"a"}
    assert whole.problem is None


def test_the_orphans_of_an_invalid_trajectory_are_all_that_were_not_delivered() -> None:
    whole = trajectory_of(*answers("a", "b"), note("a", False), end(steps=3))
    assert whole.problem is not None
    assert whole.orphans == {"a"}


def test_a_note_on_a_step_that_is_not_in_the_log_makes_no_orphan() -> None:
    assert trajectory_of(step("a"), note("unwritten", False), end()).orphans == frozenset()


# Feedback


def test_feedback_belongs_to_the_open_trajectory() -> None:
    whole = trajectory_of(step("a"), feedback(0.5), end())
    assert [received.record for received in whole.feedback] == [feedback(0.5)]


def test_feedback_on_a_closed_trajectory_stands_alone_and_is_never_late() -> None:
    assembler = TrajectoryAssembler(memory=5)
    items = feed(assembler, [*log(step("a"), end(), feedback(0.5)), at(99, feedback(0.7))])
    assert verdicts(items) == ["whole", None, None]


def test_a_copy_of_feedback_is_folded_into_the_first() -> None:
    whole = trajectory_of(step("a"), feedback(0.1), feedback(0.9), feedback(0.1), end())
    assert [received.offset for received in whole.feedback] == [1, 2]


def test_a_record_that_belongs_to_no_trajectory_stands_alone() -> None:
    scored = ScoredGroup(
        group_uid="g", prompt_uid="p", run="run", sequence=1, tokens=[], masks=[], scores=[]
    )
    assert feed(TrajectoryAssembler(), log(scored)) == [StrayRecord(at(0, scored))]


# Memory


@pytest.mark.parametrize(("offset", "late"), [(6, True), (7, False)])
def test_a_closed_trajectory_is_remembered_for_as_many_offsets_as_said(
    offset: int, late: bool
) -> None:
    assembler = TrajectoryAssembler(memory=5)
    feed(assembler, log(step("a"), end()))
    assert bool(feed(assembler, [at(offset, step("b"))])) == late


def test_a_late_step_with_a_parent_is_late_however_long_ago_the_end_was() -> None:
    assembler = TrajectoryAssembler(memory=5)
    feed(assembler, log(step("a", ids=LONG, response=[]), end()))
    items = feed(assembler, [at(1_000, child("b", step("a"), LONG, [7]))])
    assert verdicts(items) == ["late"]


def test_a_repeated_end_is_late_however_long_ago_the_first_one_was() -> None:
    assembler = TrajectoryAssembler(memory=5)
    items = feed(assembler, [*log(step("a"), end()), at(1_000, end())])
    assert verdicts(items) == ["whole", "late"]


def test_a_repeated_end_without_steps_is_late_while_the_first_one_is_remembered() -> None:
    nothing = end(steps=0, status="failed")
    assembler = TrajectoryAssembler(memory=5)
    items = feed(assembler, [at(0, nothing), at(5, nothing), at(11, nothing)])
    assert verdicts(items) == ["whole", "late", "whole"]


def test_a_repeated_end_renews_the_memory() -> None:
    """What is remembered depends on the last records alone, wherever reading began."""
    read_all, read_the_end = TrajectoryAssembler(memory=5), TrajectoryAssembler(memory=5)
    feed(read_all, [*log(step("a"), end()), at(6, end())])
    feed(read_the_end, [at(6, end())])
    for assembler in (read_all, read_the_end):
        assert verdicts(feed(assembler, [at(11, step("b"))])) == ["late"]


# What a rebuild needs


def test_the_oldest_open_record_is_that_of_the_trajectory_that_began_first() -> None:
    assembler = TrajectoryAssembler()
    assert assembler.oldest_open() is None
    feed(assembler, log(step("a", "t1"), step("b", "t2"), step("c", "t1"), first=5))
    assert assembler.oldest_open() == 5
    feed(assembler, log(end("t1", steps=2), first=8))
    assert assembler.oldest_open() == 6
    feed(assembler, log(end("t2"), first=9))
    assert assembler.oldest_open() is None


def test_forgetting_drops_what_began_before_and_keeps_the_memory_of_what_ended() -> None:
    assembler = TrajectoryAssembler()
    feed(assembler, log(step("a", "t1"), end("t1"), step("b", "t2"), step("c", "t3")))
    assembler.forget_before(3)
    assert [uid for uid, _ in assembler.open_trajectories()] == ["t3"]
    assert verdicts(feed(assembler, log(step("d", "t1"), first=4))) == ["late"]
