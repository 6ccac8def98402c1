"""The HTTP app: every route, and the OpenAPI document that describes them.

Routes are plain Starlette routes to ASGI endpoints: bodies are decoded once, by msgspec, into
exactly the fields that are used. FastAPI supplies the app around them: errors for unknown paths and
/openapi.json, whose paths are described by the `RouteSpec`s."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway.errors import ApiError, NotFound
from gateway.http.base_urls import API, PLACEHOLDERS, SplitPath, canonical_path, split_path
from gateway.http.docs_page import render_page
from gateway.http.endpoint import Endpoint, RequestLimit, openai_error
from gateway.http.exchange import Exchange
from gateway.http.openapi import describe_operation
from gateway.http.public_url import public_url
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
                spec.public_path.replace(BASE_URL, "/…"),
                partial(spec.handler, state),
                spec.error_body,
                limit,
                state.settings.max_body_bytes,
            )
            self.router.routes.append(_exact_route(spec, endpoint))
            if spec.is_hot:
                self._hot_endpoints[spec.path.removeprefix(BASE_URL + "/")] = endpoint
        self._base_url_routes = {
            spec.path.removeprefix(BASE_URL + "/"): spec.error_body
            for spec in specs
            if spec.path.startswith(BASE_URL)
        }
        """The error bodies of the routes of a trajectory, by what follows the base URL."""
        self.add_route("/docs", self._docs, ["GET"], include_in_schema=False)
        self.add_exception_handler(HTTPException, self._respond_no_route)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        endpoint = self._hot_endpoint(scope)
        if endpoint is None and scope["type"] == "http":
            scope["path"] = canonical_path(scope["path"], self._base_url_routes)
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

    async def _docs(self, _: Request) -> Response:
        return HTMLResponse(render_page(self.openapi()))

    async def _respond_no_route(self, request: Request, error: Exception) -> Response:
        """Answers a wrong URL with the right one, in the format of the API that was meant."""
        assert isinstance(error, HTTPException)
        scope = request.scope
        split = split_path(scope["path"], self._base_url_routes)
        reason = f"{request.method} {scope['path']}: {error.detail}."
        if error.status_code == 405:
            hint = f"Use {(error.headers or {}).get('Allow', 'another method')}."
        else:
            hint = _url_hint(public_url(Exchange(scope, request.receive, None, 0)), split)
        kind = ApiError if error.status_code >= 500 else NotFound
        refusal = kind(f"{reason} {hint} GET /docs lists all routes.")
        error_body = self._base_url_routes.get(split.route if split else "", openai_error)
        headers = {name.decode(): value.decode() for name, value in refusal.headers()}
        return Response(
            error_body(refusal),
            error.status_code,
            headers | dict(error.headers or {}),
            "application/json",
        )

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made from the `RouteSpec`s."""
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=[]
            )
            document["paths"] = {
                spec.public_path: {spec.method.lower(): _operation(spec)} for spec in self._specs
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
        spec.method,
        spec.public_path,
        spec.summary,
        spec.body,
        spec.query,
        spec.errors,
        spec.conditions,
    )


def _url_hint(gateway_url: str, split: SplitPath | None) -> str:
    if split is not None:
        return f"The URL of this call is {gateway_url}{split.suggestion()}."
    return f"A base URL is {gateway_url}/{'/'.join(PLACEHOLDERS)}/{API}."
