"""The HTTP app: every route, and the OpenAPI document that describes them.

Routes are plain Starlette routes to ASGI endpoints: bodies are decoded once, by msgspec, into
exactly the fields that are used. FastAPI supplies the app around them: errors for unknown paths and
/openapi.json, whose paths are described by the `RouteSpec`s."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway.errors import ApiError, NotFound
from gateway.http.endpoint import Endpoint, RequestLimit, openai_error
from gateway.http.openapi import describe_operation
from gateway.routes import llm_calls, operations, trajectories, white_box
from gateway.routes.parts import GatewayState
from gateway.routes.route import BASE_URL, RouteSpec
from servicekit import distribution

ROUTES = [*llm_calls.ROUTES, *trajectories.ROUTES, *white_box.ROUTES, *operations.ROUTES]


class GatewayApp(FastAPI):
    """The app. Hot routes, which get nearly all requests, bypass FastAPI's middleware and router."""

    def __init__(self, specs: Sequence[RouteSpec], state: GatewayState) -> None:
        super().__init__(
            title="steplog gateway",
            version=distribution.version(),
            description="LLM calls of agents, each recorded as a Step.",
            docs_url=None,
            redoc_url=None,
        )
        self._specs = specs
        self._hot_endpoints: dict[str, Endpoint] = {}
        """By what follows the base URL in their path."""
        limit = RequestLimit(state.keys, state.settings.max_requests)
        for spec in specs:
            endpoint = Endpoint(
                spec.path.replace(BASE_URL, "/…"),
                partial(spec.handler, state),
                spec.error_body,
                limit,
                state.settings.max_body_bytes,
            )
            self.router.routes.append(_exact_route(spec, endpoint))
            if spec.is_hot:
                self._hot_endpoints[spec.path.removeprefix(BASE_URL + "/")] = endpoint
        self.add_exception_handler(HTTPException, _respond_no_route)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        endpoint = self._hot_endpoint(scope)
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await endpoint(scope, receive, send)

    def _hot_endpoint(self, scope: Any) -> Endpoint | None:
        """The endpoint of a trajectory's LLM call; puts the path's parameters into the scope."""
        parts: list[str] = scope["path"].split("/", 4) if scope.get("method") == "POST" else []
        if len(parts) < 5:
            return None
        _, trajectory_uid, prompt_uid, api, path = parts
        if not (trajectory_uid and prompt_uid and api == "v1" and path in self._hot_endpoints):
            return None
        scope["path_params"] = {"trajectory_uid": trajectory_uid, "prompt_uid": prompt_uid}
        return self._hot_endpoints[path]

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made from the `RouteSpec`s."""
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=[]
            )
            document["paths"] = {
                spec.path: {spec.method.lower(): _operation(spec)} for spec in self._specs
            }
            self.openapi_schema = document
        return self.openapi_schema


def make_app(state: GatewayState) -> GatewayApp:
    return GatewayApp(ROUTES, state)


def _exact_route(spec: RouteSpec, endpoint: Endpoint) -> Route:
    route = Route(spec.path, endpoint, methods=[spec.method], name=spec.path.rpartition("/")[2])
    route.methods = {spec.method}  # Starlette would add HEAD to GET
    return route


def _operation(spec: RouteSpec) -> dict[str, Any]:
    return describe_operation(
        spec.method, spec.path, spec.summary, spec.body, spec.query, spec.errors, spec.conditions
    )


async def _respond_no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = ApiError if error.status_code >= 500 else NotFound
    body = openai_error(kind(f"{error.detail}. GET /openapi.json lists the gateway's routes."))
    return Response(body, error.status_code, error.headers, "application/json")
