"""The demo on this machine, to its end; and from its log, what the reward did and how many calls were
running while the weights changed."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPLOG = (sys.executable, "-m", "steplog")
LIMIT_S = 420


def run(folder: Path) -> dict[str, Any]:
    started = time.monotonic()
    subprocess.run([*STEPLOG, "demo", "--dir", str(folder)], check=True, timeout=LIMIT_S)
    seconds = time.monotonic() - started
    config = ("--config", str(folder / "steplog.toml"))
    subprocess.run([*STEPLOG, "kafka", "start", *config], check=True)
    try:
        outcomes = [each for each in _records("ledger", config) if each["type"] == "Outcome"]
        steps = [each for each in _records("steps", config) if each["type"] == "Step"]
    finally:
        subprocess.run([*STEPLOG, "kafka", "stop", *config], check=True)
    rewards = [outcome["metrics"]["reward_mean"] for outcome in outcomes]
    crossing = [step for step in steps if len(step["segments"]) > 1]
    assert crossing, "no call was running while an engine changed its weights"
    return {
        "seconds": seconds,
        "versions": len(outcomes),
        "first_reward": rewards[0],
        "last_reward": rewards[-1],
        "steps": len(steps),
        "steps_with_two_versions": len(crossing),
    }


def _records(topic: str, config: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    printed = subprocess.run([*STEPLOG, "cat", topic, *config], check=True, capture_output=True)
    return (json.loads(line) for line in printed.stdout.splitlines())
