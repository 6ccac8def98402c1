"""Which requests reach an endpoint, whether or not FastAPI is on the way."""

import asyncio
import json
from typing import Any

import pytest

from gateway.app import ROUTES, make_app
from gateway.http.keys import Keys
from gateway.routes.parts import GatewayState
from gateway.settings import GatewaySettings

NOT_READY = 503
"""What every route says that would need the rest of the gateway."""


def respond(method: str, path: str) -> tuple[int, bytes, dict[str, Any]]:
    """Status, body and the path's parameters."""
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
        "headers": [(b"host", b"gateway:8100")],
        "query_string": b"",
        "scheme": "http",
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], sent[1]["body"], scope.get("path_params", {})


def answered(method: str, path: str) -> tuple[int, dict[str, Any]]:
    status, _, parameters = respond(method, path)
    return status, parameters


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
        ("GET", "/health/", 200),
        ("POST", "/init_trajectory/", NOT_READY),
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


@pytest.mark.parametrize(
    "base", ["/a/b/v1", "/a/b/v1/", "/a/b", "/a/b/", "/a/b/v1/v1", "/a/b/v1//v1/"]
)
@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("POST", "chat/completions"),
        ("POST", "messages"),
        ("POST", "messages/count_tokens"),
        ("POST", "complete_trajectory"),
        ("POST", "feedback/"),
        ("GET", "models"),
        ("GET", "models/org/name"),
    ],
)
def test_a_base_url_may_have_v1_or_not_or_twice_and_a_slash_at_its_end(
    base: str, method: str, route: str
) -> None:
    status, parameters = answered(method, f"{base}/{route}")
    assert status == NOT_READY
    assert (parameters["trajectory_uid"], parameters["prompt_uid"]) == ("a", "b")


@pytest.mark.parametrize("base", ["/v1", "/v1/", "/v1/v1", "//v1"])
def test_so_may_one_without_a_trajectory(base: str) -> None:
    assert answered("POST", f"{base}/chat/completions") == (NOT_READY, {})
    assert answered("GET", f"{base}/models/org/name") == (NOT_READY, {"model": "org/name"})


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/a/chat/completions", "/a/PROMPT_UID/v1/chat/completions"),
        ("/a/v1/chat/completions", "/a/PROMPT_UID/v1/chat/completions"),
        ("/a/messages/count_tokens", "/a/PROMPT_UID/v1/messages/count_tokens"),
        ("/chat/completions", "/TRAJECTORY_UID/PROMPT_UID/v1/chat/completions"),
        ("/a//v1/chat/completions", "/a/PROMPT_UID/v1/chat/completions"),
        ("/a/b/v2/chat/completions", "/a/b/v1/chat/completions"),
        ("/v1/complete_trajectory", "/TRAJECTORY_UID/PROMPT_UID/v1/complete_trajectory"),
        ("/a/b/v1/chat", "/TRAJECTORY_UID/PROMPT_UID/v1"),
        ("/", "/TRAJECTORY_UID/PROMPT_UID/v1"),
    ],
)
def test_a_wrong_url_is_answered_with_the_right_one(path: str, meant: str) -> None:
    status, body, _ = respond("POST", path)
    assert status == 404
    message = json.loads(body)["error"]["message"]
    assert f" http://gateway:8100{meant}." in message
    assert "GET /docs" in message


def test_a_wrong_url_is_refused_in_the_format_of_its_api() -> None:
    error = json.loads(respond("POST", "/a/messages")[1])
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")


def test_names_like_the_apis_own_work_in_the_complete_form() -> None:
    for path in ("/a/v1/v1/feedback", "/v1/b/v1/feedback", "/models/models/v1/feedback"):
        status, parameters = answered("POST", path)
        assert status == NOT_READY
        assert list(parameters.values()) == path.split("/")[1:3]


def test_the_documentation_shows_every_route_and_loads_nothing_from_elsewhere() -> None:
    status, body, _ = respond("GET", "/docs")
    page = body.decode()
    assert status == 200
    for spec in ROUTES:
        assert f"<code>{spec.public_path}</code>" in page
    assert "<code>reward_expected</code>" in page
    assert "<script" not in page and "://" not in page
