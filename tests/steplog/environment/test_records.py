"""Reports about a run: rows of metrics, trackers, and the view in a terminal."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from servicekit.trackers import KINDS, TrackerKind, TrackerRow
from steplog import Agent, EnvironmentFailed, Group, Rollout
from steplog.environment.backends.backend import TrajectoryRegistration
from steplog.environment.backends.direct import Direct
from steplog.environment.backends.recording import Call
from steplog.environment.records.metrics_writer import MetricsWriter
from steplog.environment.records.progress import ProgressText, WorkSnapshot
from steplog.environment.records.statistics import Statistics
from steplog.environment.rollouts.agents import GroupContext
from tests.steplog.environment.recorded_log import lines


def rollout(reward: float | None, **given: Any) -> Rollout:
    """A rollout that generated ten tokens in two seconds."""
    backend = Direct("http://127.0.0.1:9/v1", None, 1.0, 1.0)
    trajectory = asyncio.run(backend.name_trajectory("p"))
    messages: Any = [{"role": "user", "content": "?"}]
    trajectory.calls.append(Call(messages, {"role": "assistant", "content": "!"}, "stop", 10, 2.0))
    context = GroupContext(
        backend, TrajectoryRegistration(), "p", ("agent",), 1.0, 1, lambda _: None
    )
    return Rollout(context, {"agent": Agent("agent", trajectory, reward)}, "any", **given)


def group(*rollouts: Rollout) -> Group[str]:
    return Group(0, "item", "p", list(rollouts))


def test_a_row_covers_the_groups_since_the_last_row() -> None:
    now = [0.0]
    statistics = Statistics(clock=lambda: now[0])
    statistics.add(
        group(rollout(1.0, metrics={"turns": 3.0}), rollout(0.0, metrics={"turns": 5.0}))
    )
    statistics.add(
        group(
            rollout(0.5), rollout(0.5), *(rollout(None, status=s) for s in ("failed", "cancelled"))
        )
    )
    now[0] = 10.0
    row = statistics.row()
    assert row["groups"] == 2 and row["rollouts"] == 6
    assert row["reward"] == 0.5 and row["reward_max"] == 1 and row["turns"] == 4
    assert row["equal_share"] == 0.5, "the second group teaches nothing"
    assert row["failed_share"] == row["dropped_share"] == pytest.approx(1 / 6)
    assert row["perf/tokens_per_second"] == 6 and row["perf/call_s_p95"] == 2
    assert statistics.row() == {}
    assert statistics.rollouts == 6 and statistics.tokens_per_second == 6


def test_advantages_compare_the_usable_members_of_a_group() -> None:
    good, bad, failed = rollout(1.0), rollout(0.0), rollout(None, status="failed")
    compared = group(good, bad, failed)
    assert compared.advantage(good) == pytest.approx(1, abs=1e-4)
    assert compared.advantage(bad) == pytest.approx(-1, abs=1e-4)
    assert compared.advantage(failed) is None


def test_rows_of_metrics_go_to_a_file_and_to_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked: list[TrackerRow] = []

    class Memory:
        def __init__(self, *_: Any) -> None: ...

        def write(self, row: TrackerRow) -> None:
            tracked.append(row)

        def close(self) -> None: ...

    monkeypatch.setitem(KINDS, "trackio", TrackerKind("json", Memory))

    async def write() -> None:
        metrics = MetricsWriter(["trackio"], "mine", Path("kept"), {})
        for step in range(2):
            metrics.write(step, {"reward": 0.5}, [{"item": "a"}])
        await metrics.close()

    asyncio.run(write())
    assert tracked == [(step, {"reward": 0.5}, [{"item": "a"}]) for step in range(2)]
    assert [row["groups_done"] for row in lines(Path("kept/metrics.jsonl"))] == [0, 1]


def test_a_tracker_that_is_not_installed_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("servicekit.trackers.find_spec", lambda _: None)
    with pytest.raises(EnvironmentFailed, match="Tracker wandb needs the package wandb"):
        MetricsWriter(["wandb"], "mine", Path("kept"), {})


def test_the_view_fits_a_small_terminal() -> None:
    statistics = Statistics()
    statistics.add(group(rollout(1.0), rollout(1.0)))
    statistics.add(group(rollout(0.0), rollout(0.0)))
    reason = "Too many groups in flight (limit 64). Retry this prompt after one of them is decided."
    text = ProgressText("steplog mine", statistics, lambda: WorkSnapshot(3, 10, 2, 4, reason))
    console = Console(width=80, record=True, file=Path("out").open("w"))  # noqa: SIM115
    console.print(text)
    console.file.close()
    shown = console.export_text()
    assert "3 of 10 groups" in shown and "mean reward 0.500" in shown and "2 of at most 4" in shown
    assert "waiting: Too many groups" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "3 of 10 groups, mean reward 0.500, 2 running" in text.line(), "not the last group's"
