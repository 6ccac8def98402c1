"""One engine that plays and one gateway in front of it, for the tests that need nothing special."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from steplog.kafka import local_kafka
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.steplog.environment.player import running_player
from tests.tiny_model import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def player() -> Iterator[StubEngine]:
    with running_player() as engine:
        yield engine


@pytest.fixture(scope="session")
def log(kafka: local_kafka.Broker) -> Connection:
    """Topics that the tests share: each environment has prompts of its own."""
    shared = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"env-{uuid.uuid4().hex[:8]}.")
    topics.create(shared, partitions=2)
    return shared


@pytest.fixture(scope="session")
def gateway(log: Connection, player: StubEngine, tokenizer: Path) -> Iterator[RunningGateway]:
    with running_gateway(log, [player.url], tokenizer) as running:
        yield running
