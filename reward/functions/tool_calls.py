"""Scores whether tool calls are well formed."""

from collections.abc import Iterator
from typing import Any

import msgspec

from reward.functions import Score
from reward.functions.json_schema import find_mismatch, validator
from steplog.rewards import Reward, RewardFailed, Trajectory, TrajectoryStep

MAX_ERRORS = 8
"""Errors in the reward's details."""

Tools = dict[str, Any]
"""JSON schemas of the parameters, by the tool's name."""


def tool_calls(
    key: str = "tools",
    start: str = "<tool_call>",
    end: str = "</tool_call>",
    schemas: bool = False,
    per_step: bool = False,
) -> Score:
    """The share of tool calls in the trajectory that are well formed.

    A call is a JSON object between the tags, with a `name` and an object of `arguments`. If
    metadata[key] lists tools (in the format of the OpenAI API, or their names), the name must be one of
    them; with `schemas`, the arguments must also match the tool's parameters. `per_step` also gives
    each Step its own share. A trajectory without tool calls gets no reward.
    """

    def score(trajectory: Trajectory) -> Reward | None:
        tools = known_tools(trajectory.metadata.get(key), key)
        problems_by_step = [
            [_find_problem(call, tools, schemas) for call in _calls(step, start, end)]
            for step in trajectory.steps
        ]
        problems = [problem for of_step in problems_by_step for problem in of_step]
        if not problems:
            return None
        errors = [problem for problem in problems if problem is not None]
        details = {"calls": len(problems), "malformed": len(errors), "errors": errors[:MAX_ERRORS]}
        shares = [_share(of_step) for of_step in problems_by_step] if per_step else ()
        return Reward(_share(problems), steps=shares, details=details)

    return score


def _share(problems: list[str | None]) -> float | None:
    return problems.count(None) / len(problems) if problems else None


def _calls(step: TrajectoryStep, start: str, end: str) -> Iterator[str | None]:
    """The text between the tags; None for a call without an end tag."""
    for part in step.text.split(start)[1:]:
        call, closed, _ = part.partition(end)
        yield call if closed else None


def _find_problem(call: str | None, tools: Tools | None, schemas: bool) -> str | None:
    if call is None:
        return "the call is not closed"
    try:
        content: Any = msgspec.json.decode(call.strip())
    except (msgspec.DecodeError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return "not an object with a name"
    name, arguments = content["name"], content.get("arguments")
    if not isinstance(arguments, dict):
        return f"{name[:100]}: arguments are not an object"
    if tools is not None and name not in tools:
        return f"there is no tool {name[:100]}"
    return _find_argument_problem(name, arguments, tools[name]) if schemas and tools else None


def _find_argument_problem(name: str, arguments: dict[str, Any], parameters: Any) -> str | None:
    if parameters is None:
        return None
    try:
        schema = validator(msgspec.json.encode(parameters).decode())
    except ValueError as error:
        raise RewardFailed(f"parameters of the tool {name}: {error}") from None
    problem = find_mismatch(schema, msgspec.json.encode(arguments).decode())
    return None if problem is None else f"{name}: {problem}"


def known_tools(listed: Any, key: str) -> Tools | None:
    """From a list of names, or of tools or functions in OpenAI's format; also as JSON text."""
    if listed is None:
        return None
    try:
        items = msgspec.json.decode(listed) if isinstance(listed, str) else listed
        tools: list[Any] = [{"name": item} if isinstance(item, str) else item for item in items]
        functions = [tool.get("function", tool) for tool in tools]
        return {function["name"]: function.get("parameters") for function in functions}
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        raise RewardFailed(f"metadata[{key!r}] is not a list of tools") from None
