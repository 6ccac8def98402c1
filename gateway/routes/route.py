"""One route of the API: what serves it, and what the OpenAPI document says about it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from gateway.http.endpoint import ErrorBody, openai_error
from gateway.http.exchange import Exchange
from gateway.routes.parts import GatewayState

BASE_URL = "/{trajectory_uid}/{prompt_uid}/v1"
"""The base URL of one trajectory; agents' clients append their own paths."""

RouteHandler = Callable[[GatewayState, Exchange], Awaitable[None]]


class RouteSpec(NamedTuple):
    """A route. `errors` are the statuses of its error responses; `conditions` say when one of them
    occurs, where the general description does not fit."""

    method: str
    path: str
    handler: RouteHandler
    summary: str
    errors: tuple[int, ...]
    body: type | None = None
    query: tuple[str, ...] = ()
    error_body: ErrorBody = openai_error
    conditions: Mapping[int, str] = {}
    is_hot: bool = False
    """Nearly all requests are LLM calls of a trajectory; they bypass FastAPI's middleware and
    router."""

    @property
    def public_path(self) -> str:
        """The path as the OpenAPI document and metrics show it, without Starlette's converters."""
        return self.path.replace(":path}", "}")
