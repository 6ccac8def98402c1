from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.interpreter import Interpreter
from tests.gateway.stub_engine import StubEngine, running_stub
from tests.tiny_model import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def stub() -> Iterator[StubEngine]:
    with running_stub(tokens=8) as engine:
        yield engine


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
