"""Which requests reach an endpoint, whether or not FastAPI is on the way."""

import asyncio
from typing import Any

import pytest

from gateway.app import ROUTES, make_app
from gateway.http.keys import Keys
from gateway.routes.parts import GatewayState
from gateway.settings import GatewaySettings

NOT_READY = 503
"""What every route says that would need the rest of the gateway."""


def answered(method: str, path: str) -> tuple[int, dict[str, Any]]:
    settings = GatewaySettings(tokenizer="none", engines=("http://127.0.0.1:1",))
    app = make_app(GatewayState(settings, Keys()))
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [],
        "query_string": b"",
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], scope.get("path_params", {})


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses", "completions"])
def test_a_call_is_answered_by_its_endpoint(route: str) -> None:
    names = {"trajectory_uid": "a b", "prompt_uid": "ü%"}
    assert answered("POST", f"/a b/ü%/v1/{route}") == (NOT_READY, names)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/chat/completions", NOT_READY),
        ("POST", "/a/b/v1/messages/count_tokens", NOT_READY),
        ("POST", "/a/b/v1/complete_trajectory", NOT_READY),
        ("GET", "/a/b/v1/models", NOT_READY),
        ("GET", "/a/b/v1/chat/completions", 405),
        ("POST", "/a/b/v2/chat/completions", 404),
        ("POST", "/a/b/v1/chat", 404),
        ("POST", "/a/b/v1/", 404),
        ("POST", "/a/b/c/v1/chat/completions", 404),
        ("POST", "//b/v1/chat/completions", 404),
        ("POST", "/a//v1/chat/completions", 404),
        ("GET", "/health", 200),
    ],
)
def test_everything_else_is_fastapis(method: str, path: str, status: int) -> None:
    assert answered(method, path)[0] == status


def test_the_openapi_document_says_when_each_error_occurs() -> None:
    settings = GatewaySettings(tokenizer="none", engines=("http://127.0.0.1:1",))
    document = make_app(GatewayState(settings, Keys())).openapi()
    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    assert len(operations) == len(ROUTES) == len({o["operationId"] for o in operations})
    for operation in operations:
        assert operation["summary"]
        errors = {s: r["description"] for s, r in operation["responses"].items() if s != "200"}
        assert len(set(errors.values())) == len(errors) > 0
        assert all(description.endswith(".") for description in errors.values())
