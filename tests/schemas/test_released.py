"""What was written once stays readable: every released schema, forwards and backwards."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pytest
from fastavro.schema import parse_schema

from schemas import Codec, Record, Step
from schemas.codec import current_schema
from schemas.records import RECORD_TYPES
from tests.schemas.release import BYTES, is_released, released
from tests.schemas.samples import FULL, MINIMAL

CODEC = Codec()


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_todays_schema_is_released(record_type: type[Record]) -> None:
    assert is_released(record_type), (
        f"{record_type.schema_file} has changed: run `python -m tests.schemas.release` and commit"
    )


@pytest.mark.parametrize("file", sorted(BYTES.glob("*.json")), ids=lambda file: file.stem)
def test_released_bytes_are_still_read(file: Path) -> None:
    for value in json.loads(file.read_text()):
        assert isinstance(CODEC.decode(bytes.fromhex(value)), Record)


@pytest.mark.parametrize("record", FULL + MINIMAL, ids=lambda record: type(record).__name__)
def test_the_bytes_of_a_record_do_not_change_unnoticed(record: Record) -> None:
    stem = record.schema_file.removesuffix(".avsc")
    written = [json.loads(file.read_text()) for file in BYTES.glob(f"{stem}.*.json")]
    assert CODEC.encode(record).hex() in [value for values in written for value in values]


@pytest.mark.parametrize("file", released(), ids=lambda file: file.stem)
def test_a_rolled_back_reader_reads_what_is_written_today(file: Path) -> None:
    old: Any = parse_schema(json.loads(file.read_text()))
    for record in FULL + MINIMAL:
        if record.schema_file.removesuffix(".avsc") == file.name.split(".")[0]:
            assert set(read(CODEC.encode(record)[10:], current_schema(type(record)), old)) == {
                field["name"] for field in old["fields"]
            }


def test_the_check_notices_a_breaking_change() -> None:
    changed = copy.deepcopy(json.loads((BYTES.parents[2] / "schemas/step.avsc").read_text()))
    changed["fields"].append({"name": "added_without_default", "type": "string"})
    with pytest.raises(fastavro.read.SchemaResolutionError):
        read(CODEC.encode(FULL[0])[10:], current_schema(Step), parse_schema(changed))


def test_a_field_added_with_a_default_is_read_from_old_bytes() -> None:
    changed = copy.deepcopy(json.loads((BYTES.parents[2] / "schemas/step.avsc").read_text()))
    changed["fields"].append({"name": "added", "type": "string", "default": "x"})
    datum = read(CODEC.encode(FULL[0])[10:], current_schema(Step), parse_schema(changed))
    assert datum.pop("added") == "x"
    assert msgspec.convert(datum, Step, builtin_types=(bytes,)) == FULL[0]


def read(body: bytes, writer: Any, reader: Any) -> dict[str, Any]:
    datum: Any = fastavro.schemaless_reader(io.BytesIO(body), writer, reader)
    return dict(datum)
