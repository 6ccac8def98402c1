"""Releases today's schemas: `python -m tests.schemas.release`.

Run it after a schema has changed. The schema is added to `schemas/released/`, so that what it writes
stays readable for ever, and bytes that it wrote to `tests/schemas/released/`, so that a test notices
when they are not. Nothing that was released is ever changed.
"""

import json
import re
from pathlib import Path

from schemas import Codec, Record
from schemas.codec import single_object_header
from schemas.records import RECORD_TYPES
from tests.schemas.samples import FULL, MINIMAL

SCHEMAS = Path(__file__).parents[2] / "schemas"
BYTES = Path(__file__).parent / "released"


def newest_release(record_type: type[Record]) -> int:
    stem = record_type.schema_file.removesuffix(".avsc")
    numbers = (re.fullmatch(rf"{stem}\.(\d+)\.avsc", file.name) for file in released())
    return max((int(match[1]) for match in numbers if match), default=0)


def released() -> list[Path]:
    return sorted((SCHEMAS / "released").glob("*.avsc"))


def is_released(record_type: type[Record]) -> bool:
    header = single_object_header(record_type)
    written = (json.loads(file.read_text()) for file in BYTES.glob("*.json"))
    return any(bytes.fromhex(value).startswith(header) for values in written for value in values)


def release(record_type: type[Record]) -> None:
    stem = f"{record_type.schema_file.removesuffix('.avsc')}.{newest_release(record_type) + 1}"
    schema = (SCHEMAS / record_type.schema_file).read_text()
    (SCHEMAS / "released" / f"{stem}.avsc").write_text(schema)
    samples = [record for record in FULL + MINIMAL if type(record) is record_type]
    values = [Codec().encode(record).hex() for record in samples]
    (BYTES / f"{stem}.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    for changed in (t for t in RECORD_TYPES if not is_released(t)):
        release(changed)
