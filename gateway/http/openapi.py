"""Describes a route in the OpenAPI document: parameters, body schema, and when each error occurs."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

ERROR_CONDITIONS: Mapping[int, str] = {
    400: "The body is not valid JSON, a field is missing or has an unsupported value, or an id in the "
    "path is invalid.",
    401: "API keys are configured, and the request has no valid key or signed base URL.",
    404: "The trajectory does not exist or belongs to another tenant, or the base URL has expired.",
    409: "The trajectory is already completed.",
    413: "The body, the prompt or the resulting record exceeds a size limit.",
    422: "The body is well formed, but contradicts itself or the log.",
    429: "Too many concurrent requests, open trajectories or groups in flight. Retry-After says when "
    "to retry.",
    502: "No engine returned a complete answer.",
    503: "The gateway is starting, Kafka does not acknowledge records, or no engine is usable. "
    "Retry-After says when to retry.",
}
ERROR_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "object"}},
    "required": ["error"],
}
HIDDEN = "x-hidden"
"""Marks a field that a body accepts only to refuse it; the document does not show it."""
UID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 100}


def describe_operation(
    method: str,
    path: str,
    summary: str,
    body: type | None,
    query: Iterable[str],
    errors: Iterable[int],
    conditions: Mapping[int, str],
) -> dict[str, Any]:
    """One operation of the document. `conditions` replace the general ones for this route."""
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method.lower()}{path}",
        "parameters": [*_path_parameters(path), *_query_parameters(query)],
        "responses": {
            "200": {"description": "Successful Response"},
            **{
                str(status): _error_response(conditions.get(status) or ERROR_CONDITIONS[status])
                for status in sorted({*errors, *conditions})
            },
        },
    }
    if body is not None:
        schema = {"type": "object"} if body is dict else _body_schema(body)
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": UID_SCHEMA}
        for name in ("trajectory_uid", "prompt_uid", "model")
        if f"{{{name}}}" in path
    ]


def _query_parameters(names: Iterable[str]) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "schema": UID_SCHEMA} for name in names]


def _error_response(condition: str) -> dict[str, Any]:
    return {
        "description": condition,
        "content": {"application/json": {"schema": ERROR_SCHEMA}},
    }


def _body_schema(body: type) -> dict[str, Any]:
    """A body's JSON schema with all references inlined: bodies are small and share no parts."""
    (schema,), components = msgspec.json.schema_components([body])
    inlined: dict[str, Any] = _inline(schema, components)
    return inlined


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(components[schema["$ref"].rpartition("/")[2]], components)
    return {
        name: _inline(value, components)
        for name, value in schema.items()
        if not (isinstance(value, dict) and HIDDEN in value)
    }
