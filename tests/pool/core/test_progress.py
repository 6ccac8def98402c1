from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pool.core.bookmark import Bookmark
from pool.core.progress import Progress, Received
from pool.core.trajectories import StrayRecord, Trajectory, TrajectoryAssembler
from servicekit.errors import Fatal
from tests.pool.crashes import TAPES, Tape, play_rewards, play_trainer, random_tape
from tests.pool.histories import any_logs, any_rewarded_logs, random_log
from tests.pool.records import at, end, log, run_of, step


def progress(
    committed: int = 0, start: Bookmark | None = None, memory: int = 5
) -> Progress[Trajectory | StrayRecord]:
    assembler = TrajectoryAssembler(memory)
    reading: Progress[Trajectory | StrayRecord] = Progress(
        0, assembler, committed, start or Bookmark(committed)
    )
    reading.reach(reading.read_from())
    return reading


def feed(reading: Progress[Trajectory | StrayRecord], received: list[Received]) -> list[int]:
    """The offsets that name the items which are handed out."""
    return [work.offset for one in received for work in reading.feed(one)]


# Live


def test_a_partition_without_a_past_is_live_at_once() -> None:
    assert progress().live


def test_an_item_is_named_by_the_offset_of_the_record_that_completed_it() -> None:
    assert feed(progress(), log(step("a", "t1"), *run_of("t2"), end("t1"))) == [2, 3]


def test_with_nothing_open_a_rebuild_begins_at_the_position() -> None:
    reading = progress()
    assert reading.bookmark(0) == Bookmark(0)
    (work,) = reading.feed(at(7, end(steps=0)))
    assert reading.bookmark(9, [work]) == Bookmark(9)


def test_a_rebuild_begins_at_the_first_record_of_open_state() -> None:
    reading = progress()
    feed(reading, log(step("a", "t1"), step("b", "t2"), first=3))
    assert reading.bookmark(5) == Bookmark(3)


def test_a_rebuild_begins_at_the_first_record_of_an_item_that_waits_for_its_output() -> None:
    reading = progress()
    feed(reading, log(step("a", "t1"), end("t1"), step("b", "t2"), first=3))
    assert reading.bookmark(6) == Bookmark(3, (4,))


def test_an_item_is_pending_until_its_output_is_committed() -> None:
    reading = progress()
    works = [reading.feed(received) for received in log(*run_of("t1"), *run_of("t2"))]
    first, second = [work for ready in works for work in ready]
    assert reading.bookmark(4) == Bookmark(0, (1, 3))
    assert reading.bookmark(4, [second]) == Bookmark(0, (1,))
    reading.close([second])
    assert reading.bookmark(4) == Bookmark(0, (1,))
    assert reading.bookmark(4, [first]) == Bookmark(4)


def test_the_work_of_another_assignment_does_not_finish_ours() -> None:
    """Two partitions may have items of the same offset."""
    ours, other = progress(), progress()
    feed(ours, log(*run_of("t1")))
    feed(other, log(*run_of("t2")))
    assert ours.bookmark(2, other.open.values()) == Bookmark(0, (1,))


# Rebuilding


def test_a_rebuild_reads_as_far_before_the_rebuild_offset_as_closed_trajectories_are_remembered() -> (
    None
):
    assert progress(90, Bookmark(70), memory=20).read_from() == 50
    assert progress(90, Bookmark(10), memory=20).read_from() == 0


def test_items_below_the_committed_offset_are_handed_out_only_if_they_are_pending() -> None:
    reading = progress(6, Bookmark(0, (3,)))
    records = log(*run_of("t1"), *run_of("t2"), *run_of("t3"), *run_of("t4"))
    assert feed(reading, records) == [3, 7]


def test_a_rebuild_ends_when_the_position_reaches_the_committed_offset() -> None:
    reading = progress(6, Bookmark(0))
    feed(reading, log(*run_of("t1"), step("a", "t2")))
    assert not reading.live
    reading.reach(6)  # nothing but transaction markers up to the committed offset
    assert reading.live
    assert feed(reading, [at(8, end("t2"))]) == [8]


def test_a_pending_item_waits_until_everything_is_read_again_that_may_change_it() -> None:
    reading = progress(3, Bookmark(0, (1,)))
    records = log(*run_of("t1"), step("a", "t2"), step("b", "t2"))
    assert [len(reading.feed(received)) for received in records] == [0, 0, 0, 1]


def test_a_pending_item_that_the_log_no_longer_gives_stops_the_reader() -> None:
    reading = progress(3, Bookmark(0, (2,)))
    with pytest.raises(Fatal, match="has no item at offset 2"):
        feed(reading, log(*run_of("t1"), step("a", "t2"), step("b", "t2")))


def test_what_began_before_the_rebuild_offset_was_done() -> None:
    reading = progress(4, Bookmark(2), memory=5)
    feed(reading, log(step("a", "t1"), step("b", "t2"), step("c", "t3"), step("d", "t2")))
    reading.reach(4)
    assert reading.bookmark(4).rebuild == 2


def test_what_ended_before_the_rebuild_offset_is_still_known_to_have_ended() -> None:
    reading = progress(4, Bookmark(4), memory=5)
    feed(reading, log(*run_of("t1"), step("x", "t2"), end("t2")))
    (work,) = reading.feed(at(4, step("late", "t1")))
    assert isinstance(work.item, StrayRecord)
    assert work.item.verdict == "late"


# Any crash


THOROUGH = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MEMORIES = st.integers(0, 6)


@THOROUGH
@given(any_logs(), TAPES, MEMORIES)
def test_every_trajectory_is_committed_once_whatever_the_moment_of_the_crash(
    received: list[Received], tape: Tape, memory: int
) -> None:
    play_rewards(received, tape, memory)


@THOROUGH
@given(any_logs() | any_rewarded_logs(), TAPES, MEMORIES)
def test_every_group_is_decided_once_whatever_the_moment_of_the_crash(
    received: list[Received], tape: Tape, memory: int
) -> None:
    play_trainer(received, tape, memory)


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32))
def test_no_history_is_too_long_or_too_odd(seed: int) -> None:
    random = Random(seed)
    received, tape, memory = random_log(random), random_tape(random), random.randint(0, 8)
    play_rewards(received, tape, memory)
    play_trainer(received, tape, memory)
