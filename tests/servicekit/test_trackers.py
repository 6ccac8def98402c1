"""A tracker that fails or hangs costs its own rows and nothing else."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from servicekit import trackers
from servicekit.trackers import KINDS, TrackedRun, TrackerKind, TrackerRow, Trackers

RUN = TrackedRun("math", "math", Path(), Path(), {})


class FakeTracker:
    """Fails to open a number of times, then takes every row but step 5."""

    def __init__(self, failing_opens: int = 0) -> None:
        self.failing_opens = failing_opens
        self.rows: dict[int, Mapping[str, float]] = {}

    def open(self, *_: Any) -> "FakeTracker":
        self.failing_opens -= 1
        if self.failing_opens >= 0:
            raise ConnectionError("no route to host")
        return self

    def write(self, row: TrackerRow) -> None:
        if row.step == 5:
            raise RuntimeError("disk full")
        self.rows[row.step] = row.values

    def close(self) -> None:
        raise OSError("gone")


def test_a_tracker_that_fails_is_warned_of_once_and_opened_again_at_the_next_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = FakeTracker(failing_opens=2), FakeTracker()
    monkeypatch.setitem(KINDS, "wandb", TrackerKind("json", failing.open))
    monkeypatch.setitem(KINDS, "trackio", TrackerKind("json", other.open))
    missed: list[str] = []
    chosen = Trackers(["wandb", "trackio"], RUN, missed.append)
    for step in range(1, 8):
        chosen.write(step, {"reward": step / 10})
    chosen.close()
    assert list(failing.rows) == [3, 4, 6, 7]
    assert list(other.rows) == [1, 2, 3, 4, 6, 7] and other.rows[7] == {"reward": 0.7}
    assert sorted(missed) == ["trackio", "wandb", "wandb", "wandb"]
    assert [r.message for r in caplog.records if "wandb" in r.message] == [
        "Tracker wandb missed a row, the run continues without it: "
        "ConnectionError: no route to host",
        "Tracker wandb failed to close: OSError: gone",
        "Tracker wandb missed 3 rows in all.",
    ]


def test_a_tracker_that_hangs_delays_nobody_and_keeps_a_bounded_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening, release = threading.Event(), threading.Event()

    def hang(*_: Any) -> FakeTracker:
        opening.set()
        release.wait(60)
        return FakeTracker()

    monkeypatch.setitem(KINDS, "wandb", TrackerKind("json", hang))
    monkeypatch.setattr(trackers, "QUEUE_LIMIT", 3)
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.05)
    chosen = Trackers(["wandb"], RUN)
    chosen.write(0, {})
    assert opening.wait(10)
    for step in range(1, 20):
        chosen.write(step, {})
    chosen.close()
    release.set()
    assert [r.message for r in caplog.records] == [
        "Tracker wandb missed a row, the run continues without it: it is 3 rows behind",
        "Tracker wandb did not finish within 0.05 s.",
        "Tracker wandb missed 16 rows in all.",
    ]
