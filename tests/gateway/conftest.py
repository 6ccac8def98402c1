"""One broker, one stub engine and one gateway for the tests that need nothing special."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from steplog.kafka import local_kafka
from tests.gateway.client import close_topics
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine, running_stub
from tests.tiny_model import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def stub() -> Iterator[StubEngine]:
    """Answers eight tokens, or what `stub.script` says."""
    with running_stub(tokens=8) as engine:
        yield engine


@pytest.fixture(scope="session")
def log(kafka: local_kafka.Broker) -> Iterator[Connection]:
    """Topics that the tests of the gateway share: each test has trajectories of its own."""
    shared = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"gateway-{uuid.uuid4().hex[:8]}.")
    topics.create(shared)
    yield shared
    close_topics()


@pytest.fixture(scope="session")
def gateway(log: Connection, stub: StubEngine, tokenizer: Path) -> Iterator[RunningGateway]:
    with running_gateway(log, [stub.url], tokenizer) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_rest_of_a_script(request: pytest.FixtureRequest) -> None:
    """What one test scripted and did not use is not the next one's."""
    if "stub" in request.fixturenames:
        request.getfixturevalue("stub").reset()


@pytest.fixture
def uid() -> str:
    """A trajectory that no other test has."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def prompt_uid() -> str:
    return f"p-{uuid.uuid4().hex[:12]}"
