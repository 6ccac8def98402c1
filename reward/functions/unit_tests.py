"""Code that passes its tests."""

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from reward.api import Reward, RewardFailed, Trajectory
from reward.functions import AsyncScore, harness
from reward.functions.code_blocks import last_block
from reward.functions.sandbox import Finished, open_sandbox

HARNESS = Path(harness.__file__)
KEPT = 5
"""Failures that are kept in the record."""


def unit_tests(
    key: str = "tests",
    limit_s: float = 10.0,
    memory_mb: int = 512,
    all_or_nothing: bool = False,
    at_a_time: int = 0,
    network: str = "",
) -> AsyncScore:
    """The share of tests that Python code in the last response passes, run without network.

    The code is the last fenced block. metadata[key] holds the tests: a text of Python, or a list.
    An item of the list is Python that runs after the code (functions `test…` and unittest cases in
    it are a test each, else it is one), or {"input": …, "output": …} for a program that reads and
    prints. {"inputs": […], "outputs": […]} is the same as a list of these. Without tests there is no
    opinion. `limit_s` and `memory_mb` are for all tests of a trajectory together; what is not done
    by then has failed. With `all_or_nothing` it is 1 or 0. Code may not start processes.

    `at_a_time` is how many run at once, by default one per core: more would slow each other until
    good code runs out of time. `network` asks for one way to take it away: namespace or seccomp.
    """
    sandbox = open_sandbox(limit_s, memory_mb, network)
    free = asyncio.Semaphore(at_a_time or os.cpu_count() or 1)

    async def score(trajectory: Trajectory) -> Reward | None:
        given = trajectory.metadata.get(key)
        if given is None:
            return None
        tests = as_list(given, key)
        word = secrets.token_hex(8)
        code = last_block(trajectory.text, "python", "py", "python3")
        asked = msgspec.json.encode({"word": word, "code": code, "tests": tests})
        async with free:
            finished = await sandbox.run(HARNESS, asked)
        return _reward(finished, word, len(tests), all_or_nothing)

    return score


def as_list(given: Any, key: str) -> list[Any]:
    """Each item is Python, or an input with its output."""
    if isinstance(given, dict) and {"inputs", "outputs"} <= given.keys():
        pairs = zip(given["inputs"], given["outputs"], strict=False)
        given = [{"input": read, "output": printed} for read, printed in pairs]
    tests = [given] if isinstance(given, str | dict) else given
    if not isinstance(tests, list) or not tests or not all(_is_test(test) for test in tests):
        raise RewardFailed(f"metadata[{key!r}] holds no tests")
    return tests


def _is_test(test: Any) -> bool:
    if isinstance(test, dict):
        return isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
    return isinstance(test, str)


def _reward(finished: Finished, word: str, items: int, all_or_nothing: bool) -> Reward:
    told = [line.split(" ", 2) for line in finished.report.decode(errors="replace").splitlines()]
    said = [(kind, what) for one, kind, what in (t for t in told if len(t) == 3) if one == word]
    held = [int(what) for kind, what in said if kind == "holds"]
    outcomes = [what for kind, what in said if kind == "test"]
    # An item that was not reached holds one test or more.
    total = sum(held) + items - len(held)
    passed = outcomes.count("ok")
    details: dict[str, Any] = {"passed": passed, "failed": total - passed}
    if passed < total:
        details["errors"] = [outcome for outcome in outcomes if outcome != "ok"][:KEPT]
        details["output"] = finished.tail
    if len(outcomes) < total:
        details["ended"] = _ended(finished.status)
    value = float(passed == total) if all_or_nothing else passed / total
    return Reward(value, details=details)


def _ended(status: int | None) -> str:
    if status is None:
        return "its time was up"
    return f"the process ended with {status}"
