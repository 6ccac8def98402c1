"""A model for all tests of the trainer."""

from pathlib import Path

import pytest

from tests.tiny_model import build_model_apart


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_apart(tmp_path_factory.mktemp("model"))
