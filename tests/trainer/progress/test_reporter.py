"""What the loop tells, and where it goes."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from tests.trainer.progress.reports import Clock, step
from trainer.progress.reporter import ProgressReporter
from trainer.progress.run_status import RunStatus, alarm_name
from trainer.progress.trackers import open_trackers
from trainer.progress.view import LogView


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status(clock: Clock) -> RunStatus:
    return RunStatus("math", clock)


@pytest.fixture
def progress(status: RunStatus) -> ProgressReporter:
    return ProgressReporter(status, LogView(status), open_trackers((), "math", Path(), {}))


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_time_goes_to_the_innermost_phase_and_adds_up(
    clock: Clock, progress: ProgressReporter
) -> None:
    clock.pass_(1)
    with progress.phase("recovering"):
        clock.pass_(2)
        with progress.phase("training"):
            clock.pass_(4)
        clock.pass_(8)
    assert progress.timings() == {"other": 1, "recovering": 10, "training": 4}


def test_a_step_begins_a_new_count_of_the_time(clock: Clock, progress: ProgressReporter) -> None:
    with progress.phase("training"):
        clock.pass_(4)
    progress.report_step(step(1))
    with progress.phase("waiting"):
        clock.pass_(3)
        assert progress.timings() == {"waiting": 3}


def test_the_split_is_over_the_last_steps_only(
    clock: Clock, status: RunStatus, progress: ProgressReporter
) -> None:
    with progress.phase("checkpointing"):
        clock.pass_(1000)
    progress.report_step(step(1))
    for version in range(2, 32):
        with progress.phase("waiting"):
            clock.pass_(1)
        with progress.phase("training"):
            clock.pass_(3)
        progress.report_step(step(version))
    assert status.split() == {"waiting": 0.25, "training": 0.75}


def test_a_recovery_is_one_phase_for_a_person(
    clock: Clock, status: RunStatus, progress: ProgressReporter
) -> None:
    with progress.phase("recovering"):
        clock.pass_(5)
        with progress.phase("training"):
            clock.pass_(5)
            assert (status.phase, status.phase_seconds) == ("recovering", 10)
    progress.set_start(2, 7)
    assert status.phase == "between phases"


def test_a_phase_ends_when_what_it_does_fails(clock: Clock, progress: ProgressReporter) -> None:
    before = sample("weights_broadcast_seconds_count")
    with pytest.raises(OSError), progress.phase("syncing"):
        clock.pass_(9)
        raise OSError("the engine is gone")
    clock.pass_(1)
    assert progress.timings() == {"syncing": 9, "other": 1}
    assert sample("weights_broadcast_seconds_count") == before


def test_prometheus_has_the_lengths_of_training_and_broadcasts(
    clock: Clock, progress: ProgressReporter
) -> None:
    names = ("train_step_seconds_sum", "weights_broadcast_seconds_sum")
    before = [sample(name) for name in names]
    waited = sample("trainer_phase_seconds_total", phase="waiting")
    for phase in ("training", "syncing", "waiting"):
        with progress.phase(phase):
            clock.pass_(3)
    assert [sample(name) for name in names] == [value + 3 for value in before]
    assert sample("trainer_phase_seconds_total", phase="waiting") == waited + 3


def test_long_waits_are_counted_while_they_last(clock: Clock, progress: ProgressReporter) -> None:
    before = sample("trainer_phase_seconds_total", phase="waiting")
    with progress.phase("waiting"):
        clock.pass_(60)
        progress.set_waiting(ready=3, target=8, lag=120)
        assert sample("trainer_phase_seconds_total", phase="waiting") == before + 60
    assert (sample("trainer_ready_groups"), sample("trainer_wanted_groups")) == (3, 8)


def test_a_step_reaches_prometheus(progress: ProgressReporter) -> None:
    tokens = sample("tokens_trained_total")
    trained = sample("trajectories_total", verdict="train")
    progress.report_step(step(10))
    progress.report_step(step(11, reward_mean=0.75))
    assert sample("trainer_reward_mean") == 0.75
    assert (sample("policy_version"), sample("trainer_incarnation")) == (11, 2)
    assert sample("tokens_trained_total") == tokens + 2000
    assert sample("trajectories_total", verdict="train") == trained + 12 * 11


def test_engines_are_told_by_name(status: RunStatus, progress: ProgressReporter) -> None:
    progress.set_engines(4, ["http://a", "http://b"])
    progress.set_engines(5, ["http://a"], ["http://b"])
    adopted = [sample("policy_adopted_version", engine=f"http://{name}") for name in "ab"]
    assert adopted == [5, 4]
    assert sample("trainer_engines", state="failed") == 1


def test_an_alarm_that_goes_on_is_logged_once_and_counted_each_time(
    status: RunStatus, progress: ProgressReporter, caplog: pytest.LogCaptureFixture
) -> None:
    before = sample("alarms_total", alarm="ess")
    for version in (1, 2, 3):
        progress.report_step(step(version, f"ess: 0.4{version} is low"))
    progress.report_step(step(4))
    progress.report_step(step(5, "ess: 0.45 is low"))
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert warned == [
        "alarm at version 1: ess: 0.41 is low",
        "alarm at version 5: ess: 0.45 is low",
    ]
    assert sample("alarms_total", alarm="ess") == before + 4
    assert [(a.sentence, a.version, a.times) for a in status.alarms] == [("ess: 0.45 is low", 5, 4)]


def test_only_names_become_labels() -> None:
    assert alarm_name("prefix_breaks: 3 % of the Steps") == "prefix_breaks"
    assert alarm_name("7 groups: trained twice") == "other"
    assert alarm_name("Something is wrong") == "other"


def test_progress_is_a_phase_a_step_or_a_recovered_decision_but_no_waiting(
    clock: Clock, progress: ProgressReporter
) -> None:
    with progress.phase("waiting"):
        started = clock.now
        clock.pass_(5)
        progress.set_waiting(0, 8, None)
        assert progress.last_change == started
    assert progress.last_change == clock.now
    clock.pass_(5)
    progress.set_recovered(1, 2)
    assert progress.last_change == clock.now


def test_nothing_is_logged_under_the_lock_that_the_view_needs(
    clock: Clock, status: RunStatus, progress: ProgressReporter, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the loop waits for the terminal and the terminal for the loop."""
    free: list[bool] = []

    def look() -> bool:
        if is_free := status.lock.acquire(timeout=1):
            status.lock.release()
        return is_free

    class Looking(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            with ThreadPoolExecutor(1) as other:
                free.append(other.submit(look).result())

    caplog.set_level("INFO", "trainer")
    logging.getLogger("trainer").addHandler(looking := Looking())
    try:
        with progress.phase("waiting"):
            clock.pass_(100)
            progress.set_waiting(1, 2, 3)
        progress.set_recovered(1, 1)
        progress.raise_alarm("ess: low")
        progress.report_step(step(1, "masked: high"))
    finally:
        logging.getLogger("trainer").removeHandler(looking)
    assert free == [True] * 5
