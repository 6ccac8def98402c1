"""The routes of the Atropos API: which handler answers each, and its description for OpenAPI."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.atropos.http import group_handlers, handlers
from gateway.atropos.http.bodies import EnvIdentifier, Register, RegisterEnv, ScoredData
from gateway.atropos.server import AtroposServer
from gateway.http.exchange import Exchange

Handler = Callable[[AtroposServer, Exchange, bytes], Awaitable[None]]
SCHEMA_REF = "#/components/schemas/{model}"
ERRORS = {
    "400": "The body is not valid gzip, or not text in any encoding that JSON allows.",
    "401": "The API key is missing or unknown.",
    "409": "The groups are trained by `steplog train` (--train).",
    "413": "The body is larger than --max-body-bytes.",
    "422": "The body does not match the schema.",
    "503": "The queue is full (--max-queue), or another server has taken over the run.",
}


class Route(NamedTuple):
    method: str
    path: str
    handle: Handler
    summary: str
    body: type[BaseModel] | None = None
    is_list: bool = False
    """Whether the body is a list of such objects."""
    is_hot: bool = False
    """Called all the time: counted under its own path in metrics."""


ROUTES = (
    Route("GET", "/", handlers.show_root, "Says which API this is."),
    Route("POST", "/register", handlers.register, "Registers the trainer.", Register),
    Route("GET", "/wandb_info", handlers.show_wandb_info, "The trainer's group and project."),
    Route("GET", "/info", handlers.show_info, "Batch size and longest sequence."),
    Route("GET", "/batch", group_handlers.send_batch, "Takes the next batch.", is_hot=True),
    Route("GET", "/status", handlers.show_status, "Step and queue size.", is_hot=True),
    Route("GET", "/latest_example", handlers.show_latest_example, "The group queued last."),
    Route("GET", "/reset_data", handlers.reset, "Forgets trainer, environments and groups."),
    Route(
        "POST",
        "/register-env",
        handlers.register_env,
        "Registers an environment.",
        RegisterEnv,
    ),
    Route(
        "POST",
        "/disconnect-env",
        handlers.disconnect_env,
        "Disconnects an environment.",
        EnvIdentifier,
    ),
    Route(
        "GET",
        "/status-env",
        handlers.show_env_status,
        "Step, queue sizes and weight of an environment.",
        EnvIdentifier,
        is_hot=True,
    ),
    Route(
        "POST",
        "/scored_data",
        group_handlers.receive_group,
        "Posts a scored group.",
        ScoredData,
        is_hot=True,
    ),
    Route(
        "POST",
        "/scored_data_list",
        group_handlers.receive_groups,
        "Posts several scored groups: all are taken or none.",
        ScoredData,
        is_list=True,
        is_hot=True,
    ),
)


def describe_routes() -> tuple[dict[str, Any], dict[str, Any]]:
    """The `paths` of an OpenAPI document, and the schemas that they refer to."""
    bodies = {route.body for route in ROUTES if route.body is not None}
    _, schemas = models_json_schema(
        [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)],
        ref_template=SCHEMA_REF,
    )
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return paths, schemas["$defs"]


def _operation(route: Route) -> dict[str, Any]:
    responses = {"200": {"description": "Successful response"}}
    responses |= {code: {"description": text} for code, text in ERRORS.items()}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.handle.__name__,
        "responses": responses,
    }
    if route.body is not None:
        schema: dict[str, Any] = {"$ref": SCHEMA_REF.format(model=route.body.__name__)}
        if route.is_list:
            schema = {"type": "array", "items": schema}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
