"""A worker's functions and topics."""

from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from tests.tiny_model import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=4)
    return connection
