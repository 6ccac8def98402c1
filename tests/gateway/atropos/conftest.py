"""One Atropos server for the tests that need nothing special; each begins with a reset."""

import uuid
from collections.abc import Iterator

import pytest

from pool import topics
from pool.connection import Connection
from steplog.kafka import local_kafka
from tests.gateway.atropos.running import RunningAtropos, running_atropos


@pytest.fixture(scope="session")
def atropos_log(kafka: local_kafka.Broker) -> Connection:
    shared = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"atropos-{uuid.uuid4().hex[:8]}.")
    topics.create(shared, partitions=3)
    return shared


@pytest.fixture(scope="session")
def _atropos(atropos_log: Connection) -> Iterator[RunningAtropos]:
    with running_atropos(atropos_log) as running:
        yield running


@pytest.fixture
def atropos(_atropos: RunningAtropos) -> RunningAtropos:
    _atropos.reset()
    return _atropos
