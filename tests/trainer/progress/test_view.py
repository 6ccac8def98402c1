"""What a person sees: on a terminal, and in a log."""

import io
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.trainer.progress.reports import Clock, step
from trainer.progress.panel import StatusPanel
from trainer.progress.reporter import ProgressReporter
from trainer.progress.run_status import Phase, RunStatus
from trainer.progress.time_split import time_bar, time_split
from trainer.progress.trackers import open_trackers
from trainer.progress.view import LogView, TerminalView


class Run:
    def __init__(self) -> None:
        self.clock = Clock()
        self.status = RunStatus("math", self.clock)
        self.progress = ProgressReporter(
            self.status, LogView(self.status), open_trackers((), "math", Path(), {})
        )

    def screen(self, width: int = 80) -> list[str]:
        out = io.StringIO()
        Console(file=out, width=width, color_system=None).print(StatusPanel(self.status))
        return out.getvalue().splitlines()

    def line(self, label: str, width: int = 80) -> str:
        return next(line for line in self.screen(width) if line.startswith(f"│ {label}"))


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "trainer")
    return caplog


def train(run: Run, versions: range, *alarms: str) -> None:
    for version in versions:
        with run.progress.phase("waiting"):
            run.progress.set_waiting(8, 8, 1204)
            run.clock.pass_(1)
        with run.progress.phase("training"):
            run.clock.pass_(2)
        with run.progress.phase("syncing"):
            run.clock.pass_(1)
        run.progress.report_step(step(version, *alarms, reward_mean=version / 100))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_screen_fits_its_terminal_before_and_after_the_first_step(run: Run, width: int) -> None:
    assert {len(line) for line in run.screen(width)} == {min(width, 120)}
    run.progress.set_start(3, 1)
    train(run, range(1, 300), "ess: " + "a very long sentence " * 10, "masked: 23 %")
    run.progress.set_engines(
        299, ["http://a"], [f"http://engine-{n}.cluster.example" for n in range(9)]
    )
    shown = run.screen(width)
    assert {len(line) for line in shown} == {min(width, 120)}
    assert len(shown) <= 20


def test_the_screen_says_where_the_run_is(run: Run) -> None:
    assert "starting" in run.line("no version yet")
    train(run, range(1, 31))
    run.progress.set_engines(30, ["http://a", "http://b"])
    shown = "\n".join(run.screen())
    for words in (
        "math · incarnation 2",
        "version 30",
        "0.300  ▁",
        "all groups 0.400",
        "1.3 versions   max 4",
        "lag 1,204 records",
        "45,210/s",
        "█ training 50%   ░ waiting 25%   ▓ syncing 25%",
        "train 360   stale 30 ",
        "engines       2 of 2",
    ):
        assert words in shown, words


def test_the_screen_splits_idle_time_by_its_cause(run: Run) -> None:
    causes: tuple[Phase, ...] = ("waiting", "reading", "syncing", "checkpointing")
    phases: tuple[Phase, ...] = ("training", *causes)
    for phase in phases:
        with run.progress.phase(phase):
            run.clock.pass_(1)
    run.progress.report_step(step(1))
    shown = "\n".join(run.screen(80))
    assert all(f"{cause} 20%" in shown for cause in causes), shown


def test_a_wait_shows_the_groups_that_are_ready(run: Run) -> None:
    run.progress.set_start(1, 5)
    with run.progress.phase("waiting"):
        run.clock.pass_(75)
        run.progress.set_waiting(ready=4, target=8, lag=None)
        assert "waiting 1:15 min   " + "━" * 20 + "─" * 20 in run.line("version 5")
        assert "groups ready 4 of 8" in run.line("queue")


def test_a_recovery_shows_the_decisions_that_are_trained_again(run: Run) -> None:
    with run.progress.phase("recovering"):
        run.progress.set_recovered(3, 12)
        with run.progress.phase("training"):
            assert "━─" in run.line("no version yet")
            assert "3 of 12 Decisions trained again" in run.line("no version yet")


def test_missing_metrics_are_left_out(run: Run) -> None:
    run.progress.report_step(step(1, reward_mean=float("nan"), loss=float("inf")))
    assert "nan" in run.line("reward") and "inf" in run.line("loss")


def test_a_step_is_one_line_of_the_log(run: Run, lines: pytest.LogCaptureFixture) -> None:
    train(run, range(7, 8))
    assert lines.messages == [
        "version 7: reward 0.070 (all groups 0.400); loss -0.0123; grad norm 0.41; age 1.3 (max 4); "
        "lag 1,204; 45,210 tokens/s; training 50%, waiting 25%, syncing 25%"
    ]


def test_a_wait_is_told_every_30_seconds(run: Run, lines: pytest.LogCaptureFixture) -> None:
    with run.progress.phase("waiting"):
        for _ in range(95):
            run.clock.pass_(1)
            run.progress.set_waiting(3, 8, 12)
    assert lines.messages == [
        f"waiting for groups, {time} so far: 3 of 8 are ready, lag 12"
        for time in ("30 s", "1:00 min", "1:30 min")
    ]


def test_a_long_recovery_is_told_now_and_then(run: Run, lines: pytest.LogCaptureFixture) -> None:
    with run.progress.phase("recovering"):
        for done in range(1, 13):
            run.clock.pass_(2)
            run.progress.set_recovered(done, 12)
    assert lines.messages == [f"recovery: trained {n} of 12 Decisions again" for n in (5, 10, 12)]


def test_what_is_logged_appears_above_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    logging.getLogger().addHandler(handler)
    try:
        view = TerminalView(
            RunStatus("math"), Console(file=terminal, width=80, force_terminal=True)
        )
        logging.getLogger().warning("a word in between")
        view.close()
        logging.getLogger().warning("a word at the end")
    finally:
        logging.getLogger().removeHandler(handler)
    shown = terminal.getvalue()
    assert shown.count("a word in between") == 1
    assert shown.index("a word in between") < shown.rindex("╭") < shown.index("a word at the end")
    assert sys.stderr is terminal and handler.stream is terminal


def test_the_time_bar_is_as_wide_as_it_should_be() -> None:
    split = time_split({"training": 1 / 3, "waiting": 1 / 3, "opening": 1 / 6, "other": 1 / 6})
    assert time_bar(split, 10).plain == "███░░░░▓▒▒"


def test_a_range_has_a_bar_and_an_end(run: Run, lines: pytest.LogCaptureFixture) -> None:
    run.progress.set_range(100, 1000)
    assert "10% of the range" in run.line("range") and "left" not in run.line("range")
    run.clock.pass_(60)
    run.progress.set_range(400, 1000)
    assert "━" in run.line("range") and "40% of the range, 2:00 min left" in run.line("range")
    train(run, range(1, 2))
    assert "40% of the range, 2:00 min left" in lines.messages[-1]
    assert "lag" not in lines.messages[-1]


def test_an_age_that_nobody_knows_is_not_told(run: Run, lines: pytest.LogCaptureFixture) -> None:
    run.progress.report_step(step(1, age_mean=-1.0, age_max=-1.0))
    assert "–" in run.line("age") and "age" not in lines.messages[-1]
