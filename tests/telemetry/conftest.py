"""One run of everything, for all tests that look at what it told."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.connection import Connection
from steplog.kafka import local_kafka
from tests.gateway.stub_engine import running_stub
from tests.telemetry.collector import Collector, running_collector
from tests.telemetry.pipeline import Told, run_pipeline
from tests.tiny_model import build_model_apart, build_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_apart(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest.fixture(scope="session")
def told(
    kafka: local_kafka.Broker,
    tiny_model: Path,
    tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Told]:
    prefix = f"told-{uuid.uuid4().hex[:8]}."
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=prefix)
    with (
        running_collector() as collector,
        running_stub() as stub,
        pytest.MonkeyPatch.context() as at,
    ):
        at.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        found = Told(connection, collector)
        run_pipeline(found, stub, tiny_model, tokenizer, tmp_path_factory.mktemp("told"))
        yield found
