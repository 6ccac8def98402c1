"""All services as processes, with traces and JSON lines, and whatever they log about."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from pool import topics
from pool.connection import Connection
from pool.topics import DEAD_LETTERS, REWARDED, STEPS
from schemas import TrajectoryEnd
from tests.gateway.client import said
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.log import messages, records
from tests.reward.running import running_worker
from tests.steplog.command import STEPLOG, reaching
from tests.telemetry.collector import Collector

RUN = "told"
KEY = "a-key-that-nobody-may-see-0123456789"
QUESTION = "Wie viele Kamele sind in Ouagadougou?"
ANSWER = "zweiundvierzig davon"
WRONG = "unbewertbar fremd"
REWARDS = f"""
def picky(trajectory):
    if {WRONG!r} in trajectory.text:
        raise ValueError("no number: " + trajectory.text)
    return None
"""
AGENT = "4bf92f3577b34da6a3ce929d0e0e4736"
"""The trace that an agent has begun."""
AGENT_SPAN = "00f067aa0ba902b7"
LIMIT_S = 300.0
LONG_S = 3 * LIMIT_S
"""Five processes start one after the other, two of them with torch."""


@dataclass
class Told:
    """What is left when all of them have ended."""

    connection: Connection
    collector: Collector
    uids: dict[str, str] = field(default_factory=dict)
    """The trajectories, by what became of them."""
    signatures: list[str] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)

    def lines(self, service: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.logs[service].splitlines()]

    def line(self, service: str, words: str) -> dict[str, Any]:
        """The first that says this."""
        return next(line for line in self.lines(service) if words in line["message"])


def run_pipeline(told: Told, stub: StubEngine, model: Path, tokenizer: Path, folder: Path) -> None:
    topics.create(told.connection, partitions=1)
    rewards = folder / "rewards.py"
    rewards.write_text(REWARDS)
    loud = ["--traces", "--log-format", "json"]
    stub.set_version("1.0")
    keyed = ["--keys", f"alice:{KEY}", "--run", RUN, "--group-size", "2"]
    with running_gateway(told.connection, [stub.url], tokenizer, *keyed, *loud) as gateway:
        _serve_agents(told, gateway, stub)
        gateway.terminate()
        told.logs["gateway"] = gateway.log.read_text()
    options = ["--function", f"{rewards}:picky", "--tokenizer", str(tokenizer), *loud]
    with running_worker(told.connection, *options) as worker:
        _until(lambda: _ended(told.connection) == {"good", "better", "odd", "slow"}, told)
        _until(lambda: len(messages(told.connection, DEAD_LETTERS)) == 2, told)
        assert worker.terminate() == 0
        told.logs["reward"] = worker.log.read_text()
    told.logs["train"] = _train(told.connection, model, folder, loud)


def _serve_agents(told: Told, gateway: RunningGateway, stub: StubEngine) -> None:
    for name, text in (("good", ANSWER), ("better", ANSWER), ("odd", WRONG)):
        base = _begin(told, gateway, name, "camels" if name != "odd" else "other")
        stub.script([said(text)])
        # A stream shows its first token; one agent has a trace of its own.
        assert _ask(gateway, base, stream=name == "good", traced=name == "good") == 200
        reward = {"reward": float(name == "better")}
        headers = {"traceparent": f"00-{AGENT}-{AGENT_SPAN}-01"} if name == "good" else {}
        assert gateway.post(base + "/complete_trajectory", reward, headers).status == 200
    base = _begin(told, gateway, "slow", "slow")
    # Not earlier: the base URL of a trajectory ends with its deadline.
    assert gateway.post(base + "/register_trajectory", {"deadline_s": 0.1}).status == 200
    assert _ask(gateway, base) == 200
    base = _begin(told, gateway, "broken", "broken")
    stub.script([{"ids": [1], "fault": "status:500"}] * 4)
    assert _ask(gateway, base) == 502
    producer = Producer({"bootstrap.servers": told.connection.bootstrap})
    producer.produce(told.connection.topic_name(STEPS), QUESTION.encode(), "poison")
    assert producer.flush(30) == 0


def _begin(told: Told, gateway: RunningGateway, name: str, prompt: str) -> str:
    wishes = {"prompt_uid": prompt, "metadata": {"name": name}}
    begun = gateway.post("/init_trajectory", wishes, {"authorization": f"Bearer {KEY}"}).body
    told.uids[name] = begun["trajectory_uid"]
    told.signatures.append(begun["base_url"].partition("~")[2].partition("/")[0])
    return str(begun["base_url"])


def _ask(gateway: RunningGateway, base: str, stream: bool = False, traced: bool = False) -> int:
    body = {"model": "tiny", "stream": stream, "messages": [{"role": "user", "content": QUESTION}]}
    headers = {"traceparent": f"00-{AGENT}-{AGENT_SPAN}-01"} if traced else {}
    return gateway.post(base + "/chat/completions", body, headers).status


def _ended(connection: Connection) -> set[str]:
    found = [r for r in records(connection, REWARDED) if isinstance(r, TrajectoryEnd)]
    return {json.loads(end.metadata)["name"] for end in found}


def _train(connection: Connection, model: Path, folder: Path, loud: list[str]) -> str:
    options = ["--run", RUN, "--model", str(model), "--port", "0", "--threads", "1"]
    options += ["--group-size", "2", "--groups-per-batch", "1", "--versions", "1"]
    options += ["--checkpoints", str(folder / "checkpoints")]
    done = subprocess.run(
        [STEPLOG, "train", *reaching(connection), *options, *loud],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def _until(done: Callable[[], bool], told: Told) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, _ended(told.connection)
        time.sleep(0.05)
