"""One vLLM and one gateway on it for the whole folder: vLLM takes a minute or two to start."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from pool.connection import Connection
from tests.gateway.running import RunningGateway, running_gateway
from tests.tiny_model import STRIPPING, build_model_apart
from tests.vllm_engine import TOOLS, Engine, running_vllm


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_apart(tmp_path_factory.mktemp("model"), STRIPPING)


@pytest.fixture(scope="package")
def engine(model: Path) -> Iterator[Engine]:
    with running_vllm(model, *TOOLS) as running:
        yield running


@pytest.fixture(scope="package")
def gateway(log: Connection, engine: Engine, model: Path) -> Iterator[RunningGateway]:
    with running_gateway(log, [engine.url], model) as running:
        yield running


@pytest.fixture
def client(gateway: RunningGateway, uid: str, prompt_uid: str) -> openai.OpenAI:
    return gateway.openai(uid, prompt_uid)
