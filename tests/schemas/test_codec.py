"""A record comes back as it was written, and anything else is one typed error."""

import math
from contextlib import suppress
from io import BytesIO

import fastavro
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import Codec, Record, SchemaError, ScoredGroup, Segment, Step
from schemas.codec import current_schema, single_object_header
from schemas.packing import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from schemas.records import RECORD_TYPES
from tests.schemas.samples import FULL, MINIMAL

CODEC = Codec()
SAMPLES = FULL + MINIMAL


def name(record: Record) -> str:
    return type(record).__name__


@pytest.mark.parametrize("record", SAMPLES, ids=name)
def test_a_record_survives_the_round_trip(record: Record) -> None:
    assert CODEC.decode(CODEC.encode(record)) == record


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_a_python_type_has_the_fields_and_defaults_of_its_schema(record_type: type[Record]) -> None:
    fields = current_schema(record_type)["fields"]
    assert list(record_type.__struct_fields__) == [field["name"] for field in fields]
    required = [field["name"] for field in fields if "default" not in field]
    missing = {f for f in record_type.__struct_fields__ if f in required}
    sample = next(record for record in MINIMAL if type(record) is record_type)
    rest = {f: getattr(sample, f) for f in missing}
    assert record_type(**rest) == CODEC.decode(CODEC.encode(record_type(**rest)))


def test_every_type_has_a_full_and_a_minimal_sample() -> None:
    assert [type(r) for r in FULL] == [type(r) for r in MINIMAL] == list(RECORD_TYPES)


int32 = st.integers(-(2**31), 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    response = draw(st.lists(st.tuples(int32, float32), max_size=20))
    return Step(
        step_id=draw(st.text()),
        trajectory_uid=draw(st.text()),
        prompt_uid=draw(st.text()),
        step_index=draw(int32),
        run=draw(st.text()),
        prompt_ids=pack_ids(draw(st.lists(int32))),
        parent=draw(st.none() | st.text()),
        prefix_hash=draw(st.integers(-(2**63), 2**63 - 1)),
        response_ids=pack_ids(token for token, _ in response),
        response_logprobs=pack_logprobs(logprob for _, logprob in response),
        segments=draw(
            st.lists(
                st.builds(
                    Segment,
                    incarnation=int32,
                    version=int32,
                    first_token=int32,
                    kv_version=st.none() | int32,
                )
            )
        ),
        sampling=draw(st.text()),
        request_hash=draw(st.binary()),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        metadata=draw(st.text()),
        is_last=draw(st.booleans()),
    )


@given(steps())
def test_any_step_survives_the_round_trip(step: Step) -> None:
    assert CODEC.decode(CODEC.encode(step)) == step


rows = st.lists(st.binary(max_size=300), max_size=3)
json = st.none() | st.text()


@given(
    st.builds(
        ScoredGroup,
        group_uid=st.text(),
        prompt_uid=st.text(),
        run=st.text(),
        sequence=st.integers(-(2**63), 2**63 - 1),
        env_id=st.none() | int32,
        tokens=rows,
        masks=rows,
        scores=st.lists(st.floats(allow_nan=False), max_size=3),
        advantages=st.none() | rows,
        inference_logprobs=st.none() | rows,
        messages=json,
        images=json,
        distill_logprobs=json,
        fingerprint=st.none() | st.binary(max_size=16),
    )
)
def test_a_scored_group_is_written_as_fastavro_writes_it(group: ScoredGroup) -> None:
    out = BytesIO()
    fastavro.schemaless_writer(out, current_schema(ScoredGroup), msgspec.structs.asdict(group))
    assert CODEC.encode(group) == single_object_header(ScoredGroup) + out.getvalue()


def test_packed_numbers_are_little_endian_and_exact() -> None:
    assert pack_ids([1, -100]) == b"\x01\x00\x00\x00\x9c\xff\xff\xff"
    assert list(unpack_ids(pack_ids([0, 151_645]))) == [0, 151_645]
    assert list(unpack_logprobs(pack_logprobs([-0.5, -math.inf]))) == [-0.5, -math.inf]


def test_a_step_whose_lengths_differ_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="2 response ids come with 1 logprobs"):
        step(response_ids=pack_ids([1, 2]), response_logprobs=pack_logprobs([-1.0]))


def test_a_written_step_whose_lengths_differ_is_a_schema_error() -> None:
    whole = CODEC.encode(step(response_ids=b"\1\0\0\0", response_logprobs=b"\2\0\0\0"))
    # Avro writes the length 4 as the varint 8; make the logprobs a byte shorter.
    torn = whole.replace(b"\x08\2\0\0\0", b"\x06\2\0\0")
    assert len(torn) == len(whole) - 1
    with pytest.raises(SchemaError, match="not a Step"):
        CODEC.decode(torn)


@pytest.mark.parametrize("record", SAMPLES, ids=name)
def test_every_truncation_is_a_schema_error(record: Record) -> None:
    value = CODEC.encode(record)
    for length in range(len(value)):
        with pytest.raises(SchemaError):
            CODEC.decode(value[:length])


@given(st.binary(max_size=64), st.sampled_from(SAMPLES))
def test_only_schema_errors_escape_from_garbage(garbage: bytes, record: Record) -> None:
    header = CODEC.encode(record)[:10]
    for value in (garbage, header + garbage, b"\x00" + garbage, b"\xc3\x01" + garbage):
        with suppress(SchemaError):
            assert isinstance(CODEC.decode(value), Record)


def test_an_unknown_fingerprint_is_named() -> None:
    with pytest.raises(SchemaError, match="fingerprint 0102030405060708"):
        CODEC.decode(b"\xc3\x01\x01\x02\x03\x04\x05\x06\x07\x08rest")


def test_what_follows_a_record_is_refused() -> None:
    with pytest.raises(SchemaError, match="3 bytes follow"):
        CODEC.decode(CODEC.encode(MINIMAL[0]) + b"abc")


def test_confluent_framing_without_a_registry_says_what_is_missing() -> None:
    with pytest.raises(SchemaError, match="schema id 7 needs a registry"):
        CODEC.decode(b"\x00\x00\x00\x00\x07rest")


def test_a_value_that_does_not_fit_names_the_record() -> None:
    with pytest.raises(SchemaError, match="Step does not fit its schema"):
        CODEC.encode(step(step_index="four"))


def step(**fields: object) -> Step:
    given_fields = {
        "step_id": "s",
        "trajectory_uid": "t",
        "prompt_uid": "p",
        "step_index": 0,
        "run": "r",
        "prompt_ids": b"",
        "response_ids": b"",
        "response_logprobs": b"",
        **fields,
    }
    return Step(**given_fields)  # type: ignore[arg-type]
