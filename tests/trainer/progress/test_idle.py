import pytest

from trainer.metrics import STEP_VALUES
from trainer.progress.idle import idle_metrics


def test_everything_but_training_is_idle_and_the_causes_sum_to_it() -> None:
    timings = {
        "training": 10.0,
        "waiting": 4.0,
        "reading": 1.0,
        "opening": 0.5,
        "syncing": 2.5,
        "checkpointing": 1.0,
        "recovering": 1.0,
    }
    found = idle_metrics(timings)
    assert found == {
        "idle_fraction": pytest.approx(0.5),
        "idle_waiting_fraction": 0.2,
        "idle_reading_fraction": 0.05,
        "idle_syncing_fraction": 0.15,
        "idle_checkpointing_fraction": 0.05,
        "idle_other_fraction": 0.05,
    }
    assert found.keys() <= STEP_VALUES.keys()


def test_without_time_there_is_no_share() -> None:
    assert idle_metrics({}) == {}
