"""The text of `steplog lag`."""

import io

import pytest
from rich.console import Console

from console.lag_view import LagView, format_age, largest_lags
from console.snapshot import ClusterSnapshot
from tests.console.snapshots import group, partition, run, snapshot

MILLIONS = 123_456_789


def drawn(taken: ClusterSnapshot, **options: object) -> list[str]:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(LagView(taken, **options))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_cluster_that_nobody_reads() -> None:
    assert drawn(snapshot())[-1] == "No consumer group has read these topics yet."


def test_a_group_is_one_line_where_nothing_waits() -> None:
    lines = drawn(snapshot(group("steplog-reward", "steplog.steps", partition(0, 5, 5))))
    assert lines[-1] == "steplog-reward reads steplog.steps   1 member   lag 0"


def test_partitions_with_lag_or_open_state_are_shown() -> None:
    rows = [
        partition(0, 5, 5),
        partition(1, 5, 9, lag_seconds=75.2),
        partition(2, 5, 5, rebuild=3),
        partition(3, None, 0),
    ]
    lines = drawn(snapshot(group("g", "steps", *rows)))
    assert [line.split() for line in lines[4:]] == [
        ["1", "5", "9", "4", "75", "s", "5"],
        ["2", "5", "5", "0", "3"],
        ["2", "other", "partitions", "have", "no", "lag"],
    ]
    assert len(drawn(snapshot(group("g", "steps", *rows)), all_=True)) == len(lines) + 1


def test_a_run_shows_its_backlog() -> None:
    assert drawn(snapshot(runs=(run("math", groups_waiting=1200),)))[2:4] == [
        "run math   version 3",
        "  open trajectories 4   groups running 2   waiting 1,200   oldest 2 versions",
    ]


def test_a_run_before_its_first_version() -> None:
    lines = drawn(snapshot(runs=(run(version=None, oldest_versions=None),)))
    assert lines[2] == "run run   no live version yet"
    assert "oldest" not in lines[3]


def test_large_numbers_fit_80_columns() -> None:
    many = [partition(n, MILLIONS, 2 * MILLIONS, lag_seconds=9e5) for n in range(200)]
    lines = drawn(
        snapshot(group("steplog-trainer-a-long-name", "steplog.rewarded", *many), runs=(run(),))
    )
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert lines[-1].split() == ["199", "123,456,789", "246,913,578", "123,456,789", "10", "days",
                                 "123,456,789"]  # fmt: skip


def test_a_low_terminal_shows_the_worst_partitions() -> None:
    many = [partition(n, 0, 10 * n, lag_seconds=float(n)) for n in range(1, 30)]
    lines = drawn(snapshot(group("g", "steps", *many), runs=(run(),)), height=24)
    assert len(lines) <= 24
    assert lines[-2].split()[0] == "29"
    assert "more with less lag" in lines[-1]


def test_worst_keeps_the_order_of_partitions() -> None:
    rows = [partition(n, 0, 5, lag_seconds=s) for n, s in ((0, 9.0), (1, 1.0), (2, 5.0))]
    assert [one.partition for one in largest_lags(rows, 2)] == [0, 2]


def test_an_error_is_shown_above_the_last_snapshot() -> None:
    assert drawn(snapshot(), error="k:9092 does not answer")[1] == "! k:9092 does not answer"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (75.2, "75 s"), (600, "10 min"), (10_000, "3 h"), (9e5, "10 days")],
)
def test_durations_are_short(seconds: float, words: str) -> None:
    assert format_age(seconds) == words
