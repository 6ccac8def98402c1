"""What a person sees."""

import io

import pytest
from rich.console import Console

from console.look import Look
from console.screen import Screen, duration, worst
from tests.console.looks import group, look, partition, run

MILLIONS = 123_456_789


def drawn(found: Look, **options: object) -> list[str]:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(Screen(found, **options))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_cluster_that_nobody_reads() -> None:
    assert drawn(look())[-1] == "no consumer group has read these topics yet"


def test_a_group_is_one_line_where_nothing_waits() -> None:
    lines = drawn(look(group("steplog-reward", "steplog.steps", partition(0, 5, 5))))
    assert lines[-1] == "steplog-reward reads steplog.steps   1 member   lag 0"


def test_partitions_with_lag_or_open_state_are_shown() -> None:
    rows = [
        partition(0, 5, 5),
        partition(1, 5, 9, lag_seconds=75.2),
        partition(2, 5, 5, rebuild=3),
        partition(3, None, 0),
    ]
    lines = drawn(look(group("g", "steps", *rows)))
    assert [line.split() for line in lines[4:]] == [
        ["1", "5", "9", "4", "75", "s", "5"],
        ["2", "5", "5", "0", "3"],
        ["nothing", "waits", "in", "2", "others"],
    ]
    assert len(drawn(look(group("g", "steps", *rows)), all_=True)) == len(lines) + 1


def test_a_run_is_told_in_the_language_of_the_job() -> None:
    assert drawn(look(runs=(run("math", groups_waiting=1200),)))[2:4] == [
        "run math   version 3",
        "  open trajectories 4   groups running 2   waiting 1,200   oldest 2 versions",
    ]


def test_a_run_before_its_first_version() -> None:
    lines = drawn(look(runs=(run(version=None, oldest_versions=None),)))
    assert lines[2] == "run run   no version is live yet"
    assert "oldest" not in lines[3]


def test_large_numbers_fit_80_columns() -> None:
    many = [partition(n, MILLIONS, 2 * MILLIONS, lag_seconds=9e5) for n in range(200)]
    lines = drawn(
        look(group("steplog-trainer-a-long-name", "steplog.rewarded", *many), runs=(run(),))
    )
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert lines[-1].split() == ["199", "123,456,789", "246,913,578", "123,456,789", "10", "days",
                                 "123,456,789"]  # fmt: skip


def test_a_low_terminal_shows_the_worst_partitions() -> None:
    many = [partition(n, 0, 10 * n, lag_seconds=float(n)) for n in range(1, 30)]
    lines = drawn(look(group("g", "steps", *many), runs=(run(),)), height=24)
    assert len(lines) <= 24
    assert lines[-2].split()[0] == "29"
    assert "more with less lag" in lines[-1]


def test_worst_keeps_the_order_of_partitions() -> None:
    rows = [partition(n, 0, 5, lag_seconds=s) for n, s in ((0, 9.0), (1, 1.0), (2, 5.0))]
    assert [one.partition for one in worst(rows, 2)] == [0, 2]


def test_a_trouble_is_told_beside_the_last_look() -> None:
    assert drawn(look(), trouble="k:9092 does not answer")[1] == "! k:9092 does not answer"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (75.2, "75 s"), (600, "10 min"), (10_000, "3 h"), (9e5, "10 days")],
)
def test_durations_are_short(seconds: float, words: str) -> None:
    assert duration(seconds) == words
