"""Requests that nobody would think of, made from the gateway's own OpenAPI document.

Whatever comes in, valid or not: no 5xx, no stack trace, and every refusal in the shape of its API.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.schemas import OpenApiSchema

from gateway.app import make_app
from gateway.http.keys import Keys
from gateway.routes.parts import GatewayState
from gateway.settings import GatewaySettings
from pool import topics
from pool.connection import Connection
from steplog.kafka import local_kafka
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine

pytestmark = [pytest.mark.broker, pytest.mark.slow]  # some thousand requests

KEY = "correct-horse-battery"
AnyCase = Case[Any]
UNCONFIGURED = "/compute_reward"
"""Has no worker here, and says so with 503, as its contract has it."""


def same_every_time(examples: int) -> settings:
    return settings(
        derandomize=True,
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def routes() -> Iterator[Any]:
    """Every path and method that the document has, with requests that fit it and, where it asks for
    anything, with such that do not."""
    gateway = GatewaySettings(tokenizer="none", engines=("http://127.0.0.1:1",))
    document = make_app(GatewayState(gateway, Keys())).openapi()
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            asks = about.get("requestBody") or about.get("parameters")
            for mode in list(GenerationMode) if asks else [GenerationMode.POSITIVE]:
                name = f"{method.upper()} {path} {mode.value}"
                yield pytest.param(path, method.upper(), mode, id=name)


every_route = pytest.mark.parametrize(("path", "method", "mode"), list(routes()))


@pytest.fixture(scope="module")
def fuzzed(kafka: local_kafka.Broker) -> Connection:
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"fz-{uuid.uuid4().hex[:8]}.")
    topics.create(connection)
    return connection


@pytest.fixture(scope="module")
def open_gateway(fuzzed: Connection, stub: StubEngine, tokenizer: Path) -> Iterator[RunningGateway]:
    with running_gateway(fuzzed, [stub.url], tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def keyed_gateway(
    fuzzed: Connection, stub: StubEngine, tokenizer: Path
) -> Iterator[RunningGateway]:
    with running_gateway(fuzzed, [stub.url], tokenizer, "--keys", f"us:{KEY}") as running:
        yield running


@pytest.fixture(scope="module")
def plain_schema(open_gateway: RunningGateway) -> OpenApiSchema:
    return schemathesis.openapi.from_url(f"{open_gateway.url}/openapi.json")


@pytest.fixture(scope="module")
def keyed_schema(keyed_gateway: RunningGateway) -> OpenApiSchema:
    return schemathesis.openapi.from_url(f"{keyed_gateway.url}/openapi.json")


@pytest.fixture(scope="module")
def segment(keyed_gateway: RunningGateway) -> str:
    """A trajectory's part of a path, signed for us."""
    reply = keyed_gateway.post("/init_trajectory", {}, {"authorization": f"Bearer {KEY}"})
    return str(reply.body["base_url"].split("/")[3])


@every_route
def test_no_request_breaks_the_gateway(
    plain_schema: OpenApiSchema, path: str, method: str, mode: GenerationMode
) -> None:
    @same_every_time(examples=8)
    @given(plain_schema[path][method].as_strategy(generation_mode=mode))
    def ask(case: AnyCase) -> None:
        check(case, case.call())

    ask()


@pytest.mark.slow
@every_route
def test_no_request_breaks_a_gateway_with_keys(
    keyed_schema: OpenApiSchema, path: str, method: str, mode: GenerationMode, segment: str
) -> None:
    @same_every_time(examples=12)
    @given(keyed_schema[path][method].as_strategy(generation_mode=mode))
    def ask(case: AnyCase) -> None:
        check(case, case.call())
        if "trajectory_uid" in case.path_parameters:
            case.path_parameters["trajectory_uid"] = segment
        check(case, case.call(headers={"authorization": f"Bearer {KEY}"}))

    ask()


def check(case: AnyCase, response: Any) -> None:
    assert "Traceback" not in response.text
    expected = case.path == UNCONFIGURED and response.status_code == 503
    assert response.status_code < 500 or expected, response.text
    if response.status_code >= 400:
        told = response.json()
        if "/messages" in case.path and response.status_code not in (404, 405):
            assert told["type"] == "error"
            assert {"type", "message"} <= set(told["error"])
        else:
            assert set(told["error"]) == {"message", "type", "param", "code"}
        assert told["error"]["message"]


MESSAGES = [{"role": "user", "content": "x"}]
TEMPLATES: list[dict[str, Any]] = [
    {"chat_template": "{{ 1 / 0 }}"},
    {"chat_template": "{% for i in range(99999) %}{% endfor %}"},
    {"tokenize": True},
    {"conversation": []},
    {"messages": 5},
]
UNUSABLE: list[tuple[str, Any]] = [
    *(
        ("/generate", {"prompt_ids": [1], "sampling_params": sampling})
        for sampling in (
            {"temperature": "hot"},
            {"stop": 5},
            {"stop": [5]},
            {"skip_special_tokens": "x"},
            {"stop_token_ids": 5},
            {"n": "2"},
        )
    ),
    *(
        ("/t/p/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": template})
        for template in TEMPLATES
    ),
    ("/t/p/v1/chat/completions", b'{"messages":[{"role":"user","content":"\\ud800"}]}'),
    ("/t/p/v1/chat/completions", b'{"messages":' + b"[" * 100_000),
    ("/t/p/v1/chat/completions", b"\xff"),
    ("/init_trajectory", b'{"metadata":{"a":' + b"[" * 100_000),
    ("/init_trajectory", b'{"prompt_uid":"\\ud800"}'),
    ("/t/p/v1/complete_trajectory", b'{"reward":1e999}'),
]


@pytest.mark.parametrize(("path", "body"), UNUSABLE)
def test_what_no_generator_finds_is_refused_as_well(
    open_gateway: RunningGateway, path: str, body: Any
) -> None:
    reply = open_gateway.post(path, body)
    assert reply.status == 400
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}


def test_absent_sampling_settings_are_the_engines_own(open_gateway: RunningGateway) -> None:
    absent = dict.fromkeys(("temperature", "stop", "skip_special_tokens", "n", "max_tokens"))
    body = {"prompt_ids": [1], "sampling_params": absent}
    assert open_gateway.post("/generate", body).status == 200
