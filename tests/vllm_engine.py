"""The real vLLM, as a process of its own: the tests say what it does, and not what we think it does.

It takes a minute or two to start, so start one per module and share it.
"""

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
from typing import NamedTuple

from tests.conftest import free_port

HOST = "127.0.0.1"
NAME = "tiny"
START_LIMIT_S = 300.0
POLL_S = 0.2
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SERVER = "vllm.entrypoints.openai.api_server"
# What its worker sampled from, at the temperature asked for: the values that a trainer can use.
ARGUMENTS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"),
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
)
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}


class Engine(NamedTuple):
    url: str
    pid: int
    process: "subprocess.Popen[bytes]"
    log: Path


@contextmanager
def running_vllm(model: Path, *arguments: str) -> Iterator[Engine]:
    """Serves the model as NAME until the end; give it `*TOOLS` for a server that parses tool calls."""
    port = free_port()
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
        _wait_until_healthy(engine)
        yield engine
        engine.log.unlink()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(engine: Engine) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while engine.process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{engine.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(POLL_S)
    tail = engine.log.read_text(errors="replace")[-4000:]
    raise RuntimeError(f"vLLM did not start ({engine.log}):\n{tail}")
