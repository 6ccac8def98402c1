"""Forms: patterns, tags, JSON."""

import re
from pathlib import Path
from typing import Any

import pytest

from reward.functions.code_blocks import last_block
from reward.functions.json_schema import json_schema
from reward.functions.patterns import answer_format, regex
from steplog.rewards import Reward, RewardFailed
from tests.reward.trajectories import make_trajectory


def test_a_pattern_is_found_anywhere_or_must_be_all() -> None:
    assert regex(r"\d+")(make_trajectory("it is 42")) == 1.0
    assert regex(r"\d+")(make_trajectory("nothing")) == 0.0
    assert regex(r"\d+", full=True)(make_trajectory("it is 42")) == 0.0
    assert regex(r"\d+", full=True)(make_trajectory("42")) == 1.0
    assert regex("(?i)sorry", value=-0.5)(make_trajectory("I am Sorry")) == -0.5


def test_a_pattern_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(re.error):
        regex("(")


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>hm</think><answer>4</answer>", 1.0),
        ("<think>\nhm\n\nha</think>\n\n<answer>\n4\n</answer>\n", 1.0),
        ("hm</think><answer>4</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>4</answer>", 0.0),
        ("<think>hm</think>4", 0.0),
        ("<think>hm</think> so <answer>4</answer>", 0.0),
        ("<think>hm</think><answer>4</answer> or 5", 0.0),
        ("<think>hm</think><answer>4", 0.0),
        ("<think>hm</think><think>ha</think><answer>4</answer>", 0.0),
        ("<think>hm</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>a" * 5_000, 0.0),
    ],
)
def test_thinking_then_answering(response: str, value: float) -> None:
    assert answer_format()(make_trajectory(response)) == value


def test_another_format() -> None:
    assert answer_format(r"Answer: \w+")(make_trajectory("Answer: four")) == 1.0
    assert answer_format(r"Answer: \w+")(make_trajectory("Answer: four!")) == 0.0


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("plain", "plain"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\nthen\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nprints\n```\nb\n```", "a\n"),
        ("```text\na\n```\n```json\nb\n```", "b\n"),
        ("say ```\n```Python title=x\na = '```'\n```", "a = '```'\n"),
        ("```python\ncut off", "cut off"),
        ("  ```py\n  a\n  ```", "  a\n"),
    ],
)
def test_fenced_blocks(text: str, block: str) -> None:
    assert last_block(text, "python", "py") == block


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ('{"age": 3}', None),
        ('Here:\n```json\n{"age": 3}\n```\nDone.', None),
        ('{"age": "3"}', "$.age: '3' is not of type 'integer'"),
        ("{}", "$: 'age' is a required property"),
        ('{"age": 3', "not JSON"),
        ("I am 3", "not JSON"),
        ('{"age": NaN}', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_fits(response: str, error: str | None, tmp_path: Path) -> None:
    file = tmp_path / "age.json"
    file.write_text(
        '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
    )
    for reward in (
        json_schema(str(file))(make_trajectory(response)),
        json_schema()(make_trajectory(response, schema=AGE)),
    ):
        assert isinstance(reward, Reward)
        assert reward.value == (1.0 if error is None else 0.0)
        assert (error or "") in reward.details.get("error", "")


def test_a_schema_may_be_text_and_none_is_no_opinion() -> None:
    reward = json_schema(key="form")(make_trajectory("3", form='{"type": "integer"}'))
    assert isinstance(reward, Reward) and reward.value == 1.0
    assert json_schema()(make_trajectory("3")) is None


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "number of sorts"}, "not a JSON schema"),
        ("[", "metadata"),
        ([], "a schema is an object"),
        ({"$ref": "http://127.0.0.1:9/never.json"}, "unresolvable reference"),
    ],
)
def test_a_schema_that_is_none_is_a_failure(schema: Any, why: str) -> None:
    with pytest.raises(RewardFailed, match=why):
        json_schema()(make_trajectory("3", schema=schema))
