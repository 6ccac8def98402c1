"""The real vLLM, as a process of its own: the tests say what it does, and not what we think it does.

It takes a minute or two to start, so start one per module and share it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import free_port

HOST = "127.0.0.1"
NAME = "tiny"
START_LIMIT_S = 600.0
POLL_S = 0.2
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SERVER = "vllm.entrypoints.openai.api_server"
# What its worker sampled from, at the temperature asked for: the values that a trainer can use.
ARGUMENTS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"),
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
)
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    # Its threads spin while they wait. With one on each of two cores, nothing else came to run for
    # seconds: not its own server, which sent the second token with the last.
    "VLLM_CPU_OMP_THREADS_BIND": "0",
}


class Engine(NamedTuple):
    url: str
    pid: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def post(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def label(self, version: str) -> None:
        """Gives its weights a version, and leaves them as they are."""
        self.post("/update_weight_version", {"new_version": version})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls stay where they are, as while a trainer sends weights."""
        self.post("/pause?mode=keep")
        try:
            yield
        finally:
            if self.process.poll() is None:
                self.post("/resume")

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    def requests(self) -> float:
        """How many it works on, or has put off."""
        return sum(self.metric(f"vllm:num_requests_{kind}") for kind in ("running", "waiting"))


@contextmanager
def running_vllm(model: Path, *arguments: str, port: int = 0) -> Iterator[Engine]:
    """Serves the model as NAME until the end; give it `*TOOLS` for a server that parses tool calls,
    and the port of a killed one to have that one back."""
    port = port or free_port()
    command = [sys.executable, "-m", SERVER, "--model", str(model), "--served-model-name", NAME]
    command += ["--host", HOST, "--port", str(port), *ARGUMENTS, *arguments]
    with tempfile.NamedTemporaryFile(prefix="vllm-", suffix=".log", delete=False) as output:
        # Its own session, because the engine core is a child which may outlive the server.
        process = subprocess.Popen(
            command,
            env=os.environ | SETTINGS,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    engine = Engine(f"http://{HOST}:{port}", process.pid, process, Path(output.name))
    try:
        wait_until_healthy(engine.url, process, engine.log)
        yield engine
        engine.log.unlink()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(
    url: str, process: "subprocess.Popen[bytes]", log: Path, limit_s: float = START_LIMIT_S
) -> None:
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(POLL_S)
    tail = log.read_text(errors="replace")[-4000:]
    raise RuntimeError(f"vLLM did not start ({log}):\n{tail}")
