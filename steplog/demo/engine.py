"""The demo's vLLM and what the trainer needs to send it weights: on GPUs where there are some, else on
the CPU.

The engine loads no weights: the trainer sends them. With two GPUs or more, trainer and engine have one
each. They can share a single one, if NCCL takes them for two machines: it refuses two ranks on one GPU.
"""

import ctypes
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

OPTIONS = (
    *("--served-model-name", "default", "--load-format", "dummy", "--enforce-eager"),
    *("--max-model-len", "512", "--enable-scale-out"),
    *("--logprobs-mode", "processed_logprobs"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that take new weights
}


@dataclass(frozen=True, slots=True)
class DemoEngine:
    """How engine and trainer run on this machine."""

    description: str
    options: tuple[str, ...]
    variables: Mapping[str, str]
    """Environment of the engine."""
    trainer_variables: Mapping[str, str] = field(default_factory=dict)
    trainer_settings: Mapping[str, Any] = field(default_factory=dict)

    def command(self, model: str, host: str, port: int) -> str:
        variables = {**VARIABLES, **self.variables}
        assignments = [f"{name}={value}" for name, value in variables.items()]
        server = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        address = ["--model", model, "--host", host, "--port", str(port)]
        return shlex.join(["env", *assignments, *server, *address, *OPTIONS, *self.options])


def choose_engine() -> DemoEngine:
    gpus = count_gpus() if _has_vllm_for_gpus() else 0
    if gpus == 0:
        return on_cpu()
    return on_one_gpu() if gpus == 1 else on_two_gpus()


def on_cpu() -> DemoEngine:
    return DemoEngine(
        description="CPU",
        options=("--dtype", "float32", "--weight-transfer-config", '{"backend":"gloo"}'),
        # Its threads spin while they wait, so they get one core only.
        variables={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"},
        trainer_settings={"threads": 1},
    )


def on_one_gpu() -> DemoEngine:
    return _on_gpus(
        "one GPU, shared by vLLM and the trainer",
        engine={"NCCL_HOSTID": "engine"},
        trainer={"NCCL_HOSTID": "trainer"},
    )


def on_two_gpus() -> DemoEngine:
    return _on_gpus("two GPUs", engine={"CUDA_VISIBLE_DEVICES": _second_gpu()}, trainer={})


def _on_gpus(description: str, engine: Mapping[str, str], trainer: Mapping[str, str]) -> DemoEngine:
    return DemoEngine(
        description=description,
        options=(
            *("--dtype", "bfloat16", "--gpu-memory-utilization", "0.3"),
            *("--weight-transfer-config", '{"backend":"steplog_nccl"}'),
        ),
        # FlashInfer would compile its sampler first, which takes longer than the demo.
        variables={"VLLM_USE_FLASHINFER_SAMPLER": "0", **engine},
        trainer_variables=trainer,
        # Compiling so small a model takes longer than training it.
        trainer_settings={"weights_transport": "nccl", "compile": False},
    )


def _second_gpu() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    return visible.split(",")[1].strip()


def count_gpus() -> int:
    """GPUs that CUDA shows to this process, without the seconds that importing torch takes."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _has_vllm_for_gpus() -> bool:
    """vLLM's build for CPUs is a distribution of another name."""
    try:
        distribution("vllm")
    except PackageNotFoundError:
        return False
    return True
