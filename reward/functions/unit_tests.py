"""Scores code by the tests that it passes, in a sandbox."""

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from reward.functions import AsyncScore, harness
from reward.functions.code_blocks import last_block
from reward.functions.sandbox import Finished, open_sandbox
from steplog.rewards import Reward, RewardFailed, Trajectory

HARNESS = Path(harness.__file__)
MAX_ERRORS = 5
"""Failed tests in the reward's details."""


def unit_tests(
    key: str = "tests",
    limit_s: float = 10.0,
    memory_mb: int = 512,
    all_or_nothing: bool = False,
    at_a_time: int = 0,
    network: str = "",
) -> AsyncScore:
    """The share of tests that the Python code in the last response passes, run without network.

    The code is the last fenced block. metadata[key] holds the tests: Python code, or a list. An item of
    the list is Python code that runs after the solution (each function `test…` and unittest case in it
    is a test; without any, the code itself is one), or {"input": …, "output": …} for a program that
    reads and prints. {"inputs": […], "outputs": […]} is the same as a list of these. Without tests the
    trajectory gets no reward. `limit_s` and `memory_mb` apply to all tests of a trajectory together;
    tests that are not done by then have failed. With `all_or_nothing` the reward is 1 or 0. The code
    cannot start processes.

    `at_a_time` limits the trajectories tested at once, by default to one per core: more would slow each
    other down until good code times out. `network` selects how it is blocked: namespace or seccomp.
    """
    sandbox = open_sandbox(limit_s, memory_mb, network)
    slots = asyncio.Semaphore(at_a_time or os.cpu_count() or 1)

    async def score(trajectory: Trajectory) -> Reward | None:
        specified = trajectory.metadata.get(key)
        if specified is None:
            return None
        tests = as_list(specified, key)
        secret = secrets.token_hex(8)
        code = last_block(trajectory.text, "python", "py", "python3")
        task = msgspec.json.encode({"secret": secret, "code": code, "tests": tests})
        async with slots:
            finished = await sandbox.run(HARNESS, task)
        return _reward(finished, secret, len(tests), all_or_nothing)

    return score


def as_list(specified: Any, key: str) -> list[Any]:
    """A list in which each item is Python code, or an input with its expected output."""
    if isinstance(specified, dict) and {"inputs", "outputs"} <= specified.keys():
        pairs = zip(specified["inputs"], specified["outputs"], strict=False)
        specified = [{"input": read, "output": printed} for read, printed in pairs]
    tests = [specified] if isinstance(specified, str | dict) else specified
    if not isinstance(tests, list) or not tests or not all(_is_test(test) for test in tests):
        raise RewardFailed(f"metadata[{key!r}] has no tests")
    return tests


def _is_test(test: Any) -> bool:
    if isinstance(test, dict):
        return isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
    return isinstance(test, str)


def _reward(finished: Finished, secret: str, items: int, all_or_nothing: bool) -> Reward:
    report = finished.report.decode(errors="replace").splitlines()
    lines = [line.removeprefix(f"{secret} ") for line in report if line.startswith(f"{secret} ")]
    counts = [int(line.removeprefix("holds ")) for line in lines if line.startswith("holds ")]
    outcomes = [line.removeprefix("test ") for line in lines if line.startswith("test ")]
    # An item that was not reached counts as one test, although it may hold more.
    total = sum(counts) + items - len(counts)
    passed = outcomes.count("ok")
    details: dict[str, Any] = {"passed": passed, "failed": total - passed}
    if passed < total:
        details["errors"] = [outcome for outcome in outcomes if outcome != "ok"][:MAX_ERRORS]
        details["output"] = finished.tail
    if len(outcomes) < total:
        details["ended"] = _ended(finished.status)
    value = float(passed == total) if all_or_nothing else passed / total
    return Reward(value, details=details)


def _ended(status: int | None) -> str:
    if status is None:
        return "the time limit was reached"
    return f"the process exited with status {status}"
