"""Tool calls, well formed or not; and the table of functions."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from reward.functions import FUNCTIONS, load, summary
from reward.functions.tool_calls import tool_calls
from steplog.rewards import Reward, RewardFailed
from tests.reward.trajectories import make_trajectory

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]


def call(content: str) -> str:
    return f"<tool_call>{content}</tool_call>"


def scored(trajectory: Any, **settings: Any) -> Reward:
    reward = tool_calls(**settings)(trajectory)
    assert isinstance(reward, Reward)
    return reward


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (ADD, None),
        ("Let me see. " + ADD, None),
        (call('{"name": "add", "arguments": {}}'), None),
        (call('{"name": "add"}'), "arguments are not an object"),
        (call('{"name": "add", "arguments": "{}"}'), "arguments are not an object"),
        (call('{"arguments": {}}'), "not an object with a name"),
        (call("[]"), "not an object with a name"),
        (call('{"name": "add", "arguments": {}'), "not JSON"),
        (call("[" * 100_000), "not JSON"),
        ('<tool_call>{"name": "add", "arguments": {}}', "not closed"),
    ],
)
def test_a_call_is_well_formed_or_not(response: str, error: str | None) -> None:
    reward = scored(make_trajectory(response))
    assert reward.value == (1.0 if error is None else 0.0)
    assert [error in told for told in reward.details["errors"] if error] == [True] * bool(error)


def test_the_share_is_over_all_steps() -> None:
    trajectory = make_trajectory(ADD + ADD, "thinking", ADD + call("?"), "done")
    reward = scored(trajectory, per_step=True)
    assert reward.value == 0.75
    assert reward.details["calls"] == 4 and reward.details["malformed"] == 1
    assert list(reward.steps) == [1.0, None, 0.5, None]
    assert not scored(trajectory).steps


def test_without_calls_there_is_no_opinion() -> None:
    assert tool_calls()(make_trajectory("I know it by heart.", tools=TOOLS)) is None


@pytest.mark.parametrize("tools", [TOOLS, ["add"], [TOOLS[0]["function"]], '["add"]'])
def test_names_must_be_known_where_tools_are_listed(tools: Any) -> None:
    other = ADD.replace("add", "sub")
    assert scored(make_trajectory(ADD, tools=tools)).value == 1.0
    assert scored(make_trajectory(other, tools=tools)).details["errors"] == ["there is no tool sub"]
    assert scored(make_trajectory(other)).value == 1.0


def test_arguments_may_have_to_fit() -> None:
    wrong = make_trajectory(call('{"name": "add", "arguments": {"a": "x"}}'), tools=TOOLS)
    assert scored(wrong).value == 1.0
    assert scored(wrong, schemas=True).value == 0.0
    assert scored(make_trajectory(ADD, tools=TOOLS), schemas=True).value == 1.0
    assert scored(make_trajectory(ADD, tools=["add"]), schemas=True).value == 1.0


def test_tools_that_are_none_are_a_failure() -> None:
    with pytest.raises(RewardFailed, match="not a list of tools"):
        tool_calls()(make_trajectory(ADD, tools=3))


def test_other_tags() -> None:
    other = '[TOOL]{"name": "add", "arguments": {}}[/TOOL]'
    assert scored(make_trajectory(other), start="[TOOL]", end="[/TOOL]").value == 1.0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_can_be_named_on_a_command_line(name: str) -> None:
    """Its parameters are simple, none is taken by the worker, and the help has a line for it."""
    own = {"weight", "name", "version", "timeout_s", "attempts", "at_once"}
    parameters = inspect.signature(load(name)).parameters
    assert not own & parameters.keys()
    assert {p.annotation for p in parameters.values()} <= {str, int, float, bool, Path, list[str]}
    assert 20 < len(summary(name)) <= 100
