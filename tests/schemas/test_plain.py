"""A record as plain values: the schema's names, numbers as arrays, JSON as what it says."""

import math

import msgspec
import pytest

from schemas import Record, ScoredGroup, Step, TrajectoryEnd
from schemas.packing import pack_doubles, pack_ids, pack_logprobs
from schemas.plain import to_plain
from tests.schemas.samples import FULL, MINIMAL


def name(record: Record) -> str:
    return type(record).__name__


def described(metadata: str) -> TrajectoryEnd:
    return TrajectoryEnd(
        end_id="e",
        trajectory_uid="t",
        prompt_uid="p",
        run="r",
        status="completed",
        steps=0,
        metadata=metadata,
    )


@pytest.mark.parametrize("record", FULL + MINIMAL, ids=name)
def test_names_are_the_schemas_and_values_are_json(record: Record) -> None:
    shown = to_plain(record)
    assert list(shown) == list(record.__struct_fields__)
    assert msgspec.json.decode(msgspec.json.encode(shown)) == shown


def test_packed_numbers_become_arrays_and_json_becomes_objects() -> None:
    step = FULL[0]
    assert isinstance(step, Step)
    shown = to_plain(step)
    assert shown["prompt_ids"] == [1, 2, 151_643]
    assert shown["response_ids"] == [7, 151_645]
    assert shown["response_logprobs"] == [-0.25, 0.0]
    assert shown["metadata"] == {"answer": "42"}
    assert shown["sampling"] == msgspec.json.decode(step.sampling)
    assert shown["request_hash"] == "00ff"
    assert shown["segments"] == [
        {"incarnation": 2, "version": 9, "first_token": 0, "kv_version": 7}
    ]
    assert shown["source"] == {"partition": 3, "offset": 2**40}


def test_arrays_of_packed_numbers_become_arrays_of_arrays() -> None:
    group = ScoredGroup(
        group_uid="g",
        prompt_uid="p",
        run="r",
        sequence=0,
        tokens=[pack_ids([1, 2]), b""],
        masks=[pack_ids([-100, 2]), b""],
        scores=[1.0, -1.0],
        advantages=[pack_doubles([0.1])],
        messages='[{"role": "user"}]',
    )
    shown = to_plain(group)
    assert (shown["tokens"], shown["masks"]) == ([[1, 2], []], [[-100, 2], []])
    assert shown["advantages"] == [[0.1]]
    assert shown["ref_logprobs"] is None
    assert shown["messages"] == [{"role": "user"}]


def test_what_is_no_number_stays_what_it_is() -> None:
    logprobs = pack_logprobs([math.nan, -math.inf])
    step = Step(
        step_id="s",
        trajectory_uid="t",
        prompt_uid="p",
        step_index=0,
        run="r",
        prompt_ids=b"",
        response_ids=pack_ids([1, 2]),
        response_logprobs=logprobs,
        reward=math.nan,
    )
    shown = to_plain(step)
    assert math.isnan(shown["reward"])
    assert math.isnan(shown["response_logprobs"][0])
    assert shown["response_logprobs"][1] == -math.inf


@pytest.mark.parametrize("text", ["", "just words", '{"a": NaN}', '"\\ud800"', "[" * 100_000])
def test_text_that_is_no_json_stays_text(text: str) -> None:
    shown = to_plain(described(text))
    assert shown["metadata"] == text
    msgspec.json.encode(shown)


@pytest.mark.parametrize("text", ["null", "1e3", "12345678901234567890123", '"ä"', "[]"])
def test_any_json_is_shown_as_what_it_says(text: str) -> None:
    assert to_plain(described(text))["metadata"] == msgspec.json.decode(text)


def test_bytes_that_are_no_whole_numbers_become_hexadecimal() -> None:
    group = ScoredGroup(
        group_uid="g",
        prompt_uid="p",
        run="r",
        sequence=0,
        tokens=[b"\x01\xff"],
        masks=[],
        scores=[],
    )
    assert to_plain(group)["tokens"] == ["01ff"]
