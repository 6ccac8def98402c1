"""Trajectories from texts: every byte is a token."""

from collections.abc import Sequence
from typing import Any

import msgspec

from reward.scoring.trajectory_view import view
from steplog.rewards import Trajectory
from tests.pool.records import end, step, trajectory_of


def make_trajectory(*responses: str, prompt: str = "Why?", **metadata: Any) -> Trajectory:
    """What a reward function is shown of an agent that said this, call by call."""
    steps = []
    asked = prompt
    for index, response in enumerate(responses):
        steps.append(step(f"s{index}", index=index, ids=ids(asked), response=ids(response)))
        asked += response + "\n"
    closing = end(steps=len(steps), metadata=msgspec.json.encode(metadata).decode())
    return view(trajectory_of(*steps, closing), text)


def ids(given: str) -> list[int]:
    return list(given.encode())


def text(given: Sequence[int]) -> str:
    return bytes(list(given)).decode()  # an array by itself would give its memory
