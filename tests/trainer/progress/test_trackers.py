"""The trainer's trackers: they show the same names everywhere, and a restart continues the same run."""

import importlib
import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from servicekit.errors import Fatal
from tests.trainer.progress.reports import step
from trainer.progress.reporter import open_reporter
from trainer.progress.trackers import open_trackers, tracked_id

NAMES = {
    "reward_mean", "loss", "seconds/training", "trajectories/train", "trajectories/stale", "alarms",
}  # fmt: skip


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"the package {package} is not installed"
    )


def train(name: str, folder: Path, versions: range, run: str = "math") -> None:
    """One life of a trainer."""
    with open_reporter(run, trackers=[name], folder=folder, config={"lr": 1}, live=False) as told:
        for version in versions:
            told.report_step(step(version, reward_mean=version / 10))


def scalars(folder: Path) -> Iterator[tuple[int, str, float]]:
    """What TensorBoard's event files hold: records of a length, its check, the event, its check."""
    event = importlib.import_module("tensorboardX.proto.event_pb2").Event
    for file in sorted(folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            found = event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in found.summary.value:
                yield found.step, value.tag, value.simple_value


@pytest.mark.heavy
@needs("tensorboardX")
def test_tensorboard_reads_every_life_of_a_run(tmp_path: Path) -> None:
    train("tensorboard", tmp_path, range(1, 3))
    train("tensorboard", tmp_path, range(3, 4))
    found = list(scalars(tmp_path / "tensorboard" / "math"))
    rewards = [(at, round(value, 3)) for at, name, value in found if name == "reward_mean"]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert {name for _, name, _ in found} >= NAMES


LIVES = """
import sys
from pathlib import Path
from tests.trainer.progress.test_trackers import train
train(sys.argv[1], Path(sys.argv[2]), range(1, 3))
train(sys.argv[1], Path(sys.argv[2]), range(3, 4))
"""


def two_lives(name: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: such packages leave threads, hooks and services behind."""
    command = [sys.executable, "-c", LIVES, name, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.heavy
@needs("wandb")
def test_wandb_works_without_a_network_and_both_lives_have_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    told = two_lives("wandb", tmp_path)
    assert told.returncode == 0, told.stderr
    assert "Tracker wandb" not in told.stderr and "wandb:" not in told.stderr
    files = list(tmp_path.glob("wandb/offline-run-*/run-math.wandb"))
    assert len({file.parent for file in files}) == 2
    written = b"".join(file.read_bytes() for file in files)
    assert all(name.encode() in written for name in NAMES)


@pytest.mark.heavy
@needs("trackio")
def test_trackio_keeps_both_lives_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    told = two_lives("trackio", tmp_path)
    assert told.returncode == 0, told.stderr
    with sqlite3.connect(tmp_path / "steplog.db") as database:
        rows = list(database.execute("select run_name, step, metrics from metrics order by step"))
    database.close()
    assert [(run, at) for run, at, _ in rows] == [("math", 1), ("math", 2), ("math", 3)]
    assert json.loads(rows[2][2])["reward_mean"] == 0.3
    assert json.loads(rows[0][2]).keys() >= NAMES


def test_a_missing_package_is_one_sentence_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servicekit.trackers.find_spec", lambda name: None)
    for name, package in (("wandb", "wandb"), ("tensorboard", "tensorboardX")):
        sentence = f"Tracker {name} needs the package {package}: pip install {package}"
        with pytest.raises(Fatal, match=sentence):
            open_trackers([name], "math", tmp_path, {})
    with pytest.raises(Fatal, match="no tracker mlflow; choose from wandb, tensorboard, trackio"):
        open_trackers(["mlflow"], "math", tmp_path, {})


def test_a_run_has_one_id_for_ever_and_another_run_another() -> None:
    assert tracked_id("math-7b_v1.2") == "math-7b_v1.2"
    assert tracked_id("a/b c") == tracked_id("a/b c") != tracked_id("a-b-c")
    assert len(tracked_id("x" * 500)) < 64
