"""The cost of a recorded call in the gateway, compared with a minimal proxy (the floor)."""

import asyncio
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from bench.gateway.load import HttpRequest, closed_loop, open_loop
from bench.gateway.prompts import build_tokenizer, passages, source_code, source_text
from bench.gateway.streams import hold_streams
from pool import topics
from pool.connection import Connection
from tests.conftest import free_port
from tests.gateway.stub_engine import running_stub

CALLS = 2_000
AT_ONCE = 32
ROUNDS = 3
RATE = 100.0
STREAMS = 2_000
PROMPT_TOKENS, RESPONSE_TOKENS = 512, 128
SLOW_STREAM = {
    "ids": [*range(32, 32 + RESPONSE_TOKENS - 1), 1],
    "delay": 8.0,
    "chunk": 16,
    "chunk_delay": 2.0,
}
"""Slow enough that all streams are open at the same time."""
ROOT = Path(__file__).parents[2]


class ServerProcess(NamedTuple):
    url: str
    process: psutil.Process

    def cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


class CallCase(NamedTuple):
    server: ServerProcess
    calls_each: int
    """Calls per trajectory."""
    same_prompt: int
    """Consecutive calls with equal messages."""
    texts: Iterator[str]

    def requests(self, name: str, count: int) -> list[HttpRequest]:
        texts = [next(self.texts) for _ in range(0, count, self.same_prompt)]
        return [
            chat_request(
                f"{name}-{self.calls_each}", at // self.calls_each, texts[at // self.same_prompt]
            )
            for at in range(count)
        ]


class CallCost(NamedTuple):
    rate: float
    cpu: float
    """Milliseconds of the server's CPU time per call."""


def run(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    with tempfile.TemporaryDirectory() as folder, running_stub(tokens=RESPONSE_TOKENS) as stub:
        tokenizer = build_tokenizer(Path(folder))
        texts = passages(tokenizer, PROMPT_TOKENS, source_text(), 37)
        code = passages(tokenizer, PROMPT_TOKENS, source_code(), PROMPT_TOKENS)
        with (
            running_floor(stub.url, connection) as floor,
            running_floor(stub.url, connection, tokenizer) as tokenizing,
            running_gateway(stub.url, connection, tokenizer) as gateway,
        ):
            show_costs(floor, tokenizing, gateway, texts, code)
            show_latency(stub.url, floor, gateway, texts)
            stub.script([SLOW_STREAM] * STREAMS)
            hold_streams(gateway.url, gateway.process, STREAMS, next(texts))


def show_costs(
    floor: ServerProcess,
    tokenizing: ServerProcess,
    gateway: ServerProcess,
    texts: Iterator[str],
    code: Iterator[str],
) -> None:
    cases = {
        "floor: proxy, orjson, awaited ack": CallCase(floor, 1, 1, texts),
        "floor that also tokenizes": CallCase(tokenizing, 1, 1, texts),
        "floor that tokenizes, code": CallCase(tokenizing, 1, 1, code),
        "gateway, a known prompt, open trajectory": CallCase(gateway, 4, CALLS, texts),
        "gateway, groups of 8 share their prompt": CallCase(gateway, 1, 8, texts),
        "gateway, every call a new prompt and trajectory": CallCase(gateway, 1, 1, texts),
        "the same, code with unseen words": CallCase(gateway, 1, 1, code),
    }
    best: dict[str, CallCost] = {}
    for turn in range(ROUNDS):
        for number, (name, case) in enumerate(cases.items()):
            cost = measure_calls(case, f"{turn}-{number}")
            if name not in best or cost.cpu < best[name].cpu:
                best[name] = cost
    floor_cost = next(iter(best.values()))
    print(
        f"\nGateway: {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens, durable, {AT_ONCE} at once, "
        f"stub engine, best of {ROUNDS} rounds of {CALLS:,} calls"
    )
    print(f"  {'':<48} {'calls/s':>10} {'ms CPU':>8} {'of floor':>9} {'CPU×':>6}")
    for name, cost in best.items():
        print(
            f"  {name:<48} {cost.rate:>10,.0f} {cost.cpu:>8.2f} "
            f"{cost.rate / floor_cost.rate:>9.2f} {cost.cpu / floor_cost.cpu:>6.2f}"
        )
    print("  target: at most 1.5 ms of CPU, and 1.6 times the floor")


def measure_calls(case: CallCase, name: str) -> CallCost:
    warm_up = case.requests(f"warm-{name}", AT_ONCE * 4)
    asyncio.run(closed_loop(case.server.url, warm_up, AT_ONCE))
    requests = case.requests(name, CALLS)
    before = case.server.cpu()
    seconds = asyncio.run(closed_loop(case.server.url, requests, AT_ONCE))
    return CallCost(CALLS / seconds, (case.server.cpu() - before) / CALLS * 1e3)


def chat_request(name: str, trajectory: int, text: str) -> HttpRequest:
    body = {"model": "default", "messages": [{"role": "user", "content": text}]}
    path = f"/t{name}-{trajectory}/p{name}-{trajectory // 8}/v1/chat/completions"
    return HttpRequest(path, msgspec.json.encode(body))


def show_latency(
    engine: str, floor: ServerProcess, gateway: ServerProcess, texts: Iterator[str]
) -> None:
    direct = HttpRequest(
        "/inference/v1/generate",
        msgspec.json.encode(
            {"token_ids": list(range(PROMPT_TOKENS)), "sampling_params": {"logprobs": 0}}
        ),
    )
    seconds = 10
    # A group of 8 begins with the same prompt, and a trajectory has 4 calls.
    prompts = [next(texts) for _ in range(int(RATE * seconds) // 8)]
    rows = {
        "the engine alone": (engine, lambda _: direct),
        "floor": (floor.url, lambda at: chat_request("latency-floor", at // 4, prompts[at // 8])),
        "gateway": (gateway.url, lambda at: chat_request("latency", at // 4, prompts[at // 8])),
    }
    print(f"\nLatency at an offered {RATE:.0f} calls/s (open loop, {seconds} s each), milliseconds")
    print(f"  {'':<44} {'p50':>8} {'p99':>8} {'added p50':>10}")
    base = 0.0
    for name, (url, make) in rows.items():
        latencies = asyncio.run(open_loop(url, make, RATE, int(RATE * seconds)))
        p50, p99 = (latencies[int(len(latencies) * q)] * 1e3 for q in (0.5, 0.99))
        base = base or p50
        print(f"  {name:<44} {p50:>8.2f} {p99:>8.2f} {p50 - base:>10.2f}")
    print("  target: at most 5 ms added")


@contextmanager
def running_floor(
    engine: str, connection: Connection, tokenizer: Path | None = None
) -> Iterator[ServerProcess]:
    port = free_port()
    options = ["--engine", engine, "--bootstrap", connection.bootstrap, "--port", str(port)]
    options += ["--topic", connection.topic_name("steps")]
    options += ["--tokenizer", str(tokenizer / "tokenizer.json")] if tokenizer else []
    with running([sys.executable, "-m", "bench.gateway.floor", *options], port, "/") as server:
        yield server


@contextmanager
def running_gateway(
    engine: str, connection: Connection, tokenizer: Path
) -> Iterator[ServerProcess]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("steplog")), "gateway", "--port", str(port)]
    command += ["--bootstrap", connection.bootstrap, "--topic-prefix", connection.topic_prefix]
    command += ["--engines", engine, "--tokenizer", str(tokenizer)]
    with running(command, port, "/ready") as server:
        yield server


@contextmanager
def running(command: Sequence[str], port: int, probe: str) -> Iterator[ServerProcess]:
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        server = ServerProcess(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
        try:
            wait_until_up(server.url + probe)
            yield server
        finally:
            process.kill()


def wait_until_up(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=None), timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"no server answers at {url}")
