"""How lag is counted."""

from console.snapshot import CommittedOffset, PartitionOffsets, group_lag, partition_lag
from pool.core.bookmark import Bookmark, add_mark
from tests.console.snapshots import partition

BOUNDS = PartitionOffsets(topic="steps", partition=3, oldest=10, end=100)


def test_lag_is_the_end_less_the_committed_offset() -> None:
    found = partition_lag(BOUNDS, CommittedOffset(60, None), written_at=995.0, now=1000.0)
    assert (found.committed, found.end, found.lag, found.lag_seconds) == (60, 100, 40, 5.0)


def test_what_was_never_committed_was_never_processed() -> None:
    found = partition_lag(BOUNDS, None, None, 0.0)
    assert (found.committed, found.rebuild, found.lag) == (None, None, 90)


def test_nothing_that_waits_is_no_seconds_behind() -> None:
    assert partition_lag(BOUNDS, CommittedOffset(100, None), None, 1000.0).lag_seconds == 0


def test_a_clock_that_is_ahead_gives_no_negative_seconds() -> None:
    assert partition_lag(BOUNDS, CommittedOffset(60, None), 1001.0, 1000.0).lag_seconds == 0


def test_the_rebuild_offset_comes_from_the_bookmark() -> None:
    commit = CommittedOffset(60, add_mark(Bookmark(42, (50,)).encode()))
    assert partition_lag(BOUNDS, commit, None, 0.0).rebuild == 42


def test_the_metadata_of_another_program_are_left_alone() -> None:
    assert CommittedOffset(60, "its own words").rebuild() is None


def test_a_commit_behind_the_end_is_no_negative_lag() -> None:
    """The ends were asked for before the commits."""
    assert partition_lag(BOUNDS, CommittedOffset(101, None), None, 0.0).lag == 0


def test_a_group_is_as_far_behind_as_its_worst_partition() -> None:
    partitions = [partition(0, 5, 9, lag_seconds=2.5), partition(1, 5, 6, lag_seconds=7.0)]
    found = group_lag("g", "steps", 2, partitions)
    assert (found.lag, found.lag_seconds, found.members) == (5, 7.0, 2)


def test_a_partition_with_open_state_is_not_quiet() -> None:
    assert partition(0, 9, 9).is_quiet
    assert not partition(0, 9, 9, rebuild=4).is_quiet
    assert not partition(0, 8, 9).is_quiet
