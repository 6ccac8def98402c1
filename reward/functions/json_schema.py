"""Scores whether the response is JSON that matches a schema."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from reward.functions import Score
from reward.functions.code_blocks import last_block
from steplog.rewards import Reward, RewardFailed, Trajectory

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

MAX_ERROR = 200
"""Characters of an error in the reward's details."""


def json_schema(schema: str = "", key: str = "schema") -> Score:
    """1 if the last response, or the fenced block in it, is JSON that matches a schema, else 0.

    `schema` is a file. Without it the schema is metadata[key], as an object or as text, and a
    trajectory that has none gets no reward.
    """
    from_file = validator(Path(schema).read_text()) if schema else None

    def score(trajectory: Trajectory) -> Reward | None:
        schema_validator = from_file or _validator_of(trajectory, key)
        if schema_validator is None:
            return None
        problem = find_mismatch(schema_validator, last_block(trajectory.text, "json"))
        return Reward(float(problem is None), details={"error": problem} if problem else {})

    return score


@lru_cache(maxsize=256)
def validator(schema: str) -> "Validator":
    """Raises ValueError if the text is not a JSON schema."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    content: Any = msgspec.json.decode(schema)
    if not isinstance(content, dict):
        raise ValueError("a schema is an object")
    kind = validator_for(content)
    try:
        kind.check_schema(content)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
    # With an empty registry, a reference to a URL is an error and fetches nothing.
    return kind(content, registry=Registry())


def find_mismatch(schema: "Validator", text: str) -> str | None:
    """Why the text is not JSON that matches the schema; None if it matches."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(schema.iter_errors(msgspec.json.decode(text.strip())))
    except msgspec.DecodeError as broken:
        return f"not JSON: {broken}"[:MAX_ERROR]
    except RecursionError:
        return "nested too deeply"
    except Unresolvable as missing:
        raise RewardFailed(f"the schema has an unresolvable reference: {missing}") from None
    return None if error is None else f"{error.json_path}: {error.message}"[:MAX_ERROR]


def _validator_of(trajectory: Trajectory, key: str) -> "Validator | None":
    schema = trajectory.metadata.get(key)
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    try:
        return validator(text)
    except ValueError as error:
        raise RewardFailed(f"metadata[{key!r}]: {error}") from None
