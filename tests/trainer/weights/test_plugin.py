"""What vLLM loads of us is light, and registers itself."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in told.stdout.split()}


def test_vllm_finds_the_plugin() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="steplog")
    assert found.value == "trainer.weights.plugin:register"


def test_the_plugin_imports_nothing_heavy_before_vllm_asks_for_it() -> None:
    heavy = {"torch", "vllm", "numpy", "pydantic"}
    assert not modules_after("import trainer.weights.plugin") & heavy


@pytest.mark.slow
def test_workers_load_nothing_of_the_log() -> None:
    loaded = modules_after("import trainer.weights.gloo, trainer.weights.nccl")
    assert not loaded & {"pool", "schemas", "confluent_kafka", "aiokafka", "vllm"}
