"""vLLM servers that wait for weights, as `bench.gpu` starts them."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import free_port
from tests.vllm_engine import wait_until_healthy

HOST = "127.0.0.1"
START_S = 240.0
OPTIONS = (
    *("--load-format", "dummy", "--enforce-eager", "--max-model-len", "2048"),
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--worker-extension-cls", "bench.gpu.checksums.ChecksumWorker"),
)
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
}
GPU_OPTIONS = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.2")
BACKENDS = {"nccl": "steplog_nccl", "gloo": "gloo"}


@dataclass(frozen=True, slots=True)
class Engine:
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def checksums(self) -> dict[str, str]:
        response = self._post("/collective_rpc", {"method": "checksums", "timeout": 120})
        (checksums,) = response["results"]
        return dict(checksums)

    def is_paused(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/is_paused", timeout=10) as response:
            return bool(json.load(response)["is_paused"])

    def kill(self) -> None:
        """SIGKILL for the server and for the engine behind it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _post(self, path: str, body: Any) -> Any:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=180) as response:
            return json.load(response)


@contextmanager
def running_engines(model: Path, transport: str, count: int, logs: Path) -> Iterator[list[Engine]]:
    engines = [_start(model, transport, index, logs) for index in range(count)]
    try:
        for engine in engines:
            wait_until_healthy(engine.url, engine.process, engine.log, START_S)
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def _start(model: Path, transport: str, index: int, logs: Path) -> Engine:
    port = free_port()
    options = GPU_OPTIONS if transport == "nccl" else ("--dtype", "float32")
    backend = json.dumps({"backend": BACKENDS[transport]})
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", HOST, "--port", str(port), "--weight-transfer-config", backend),
        *OPTIONS,
        *options,
    ]
    # All processes share one GPU, which NCCL allows only to those that seem to be different hosts.
    variables = os.environ | VARIABLES | {"NCCL_HOSTID": f"engine-{index}"}
    log = logs / f"{model.name}-engine-{index}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Engine(f"http://{HOST}:{port}", process, log)
