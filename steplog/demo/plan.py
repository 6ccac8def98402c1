"""The demo's stack: a settings file that `steplog up` could read too, and a part that makes the
model."""

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from steplog.demo import task
from steplog.demo.settings import DemoSettings
from steplog.settings import load
from steplog.stack.plan import StackPart, StackPlan
from steplog.stack.planner import StackPlanner
from steplog.stack.settings import StackSettings

HOST = "127.0.0.1"
RUN = "demo"
GROUP_SIZE = 8
GROUPS_PER_BATCH = 8
STALENESS = 1
"""How many versions the engine may work ahead of the trainer (eta)."""
CONCURRENT_GROUPS = 8
"""Groups that the agents work on at the same time."""
DEADLINE_S = 120
"""Seconds. Trajectories that an interrupted run left open must not block new groups for long."""
ENGINE_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that take new weights
    # Its threads spin while they wait, so they get one core only.
    "VLLM_CPU_OMP_THREADS_BIND": "0",
}
ENGINE_OPTIONS = (
    *("--served-model-name", "default", "--load-format", "dummy", "--enforce-eager"),
    *("--dtype", "float32", "--max-model-len", "512", "--enable-scale-out"),
    *("--logprobs-mode", "processed_logprobs"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--weight-transfer-config", '{"backend":"gloo"}'),
)
"""The engine loads no weights: the trainer sends them."""


class Ports(NamedTuple):
    kafka: int
    engine: int
    gateway: int
    reward: int
    train: int


def write_settings(settings: DemoSettings, directory: Path, ports: Ports, target: int) -> Path:
    file = directory / "steplog.toml"
    tables = _tables(settings, directory, ports, target)
    lines = [f"bootstrap = {json.dumps(f'{HOST}:{ports.kafka}')}"]
    for name, table in tables.items():
        lines += [
            "",
            f"[{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in table.items()),
        ]
    file.write_text("\n".join([*lines, ""]))
    return file


def _tables(
    settings: DemoSettings, directory: Path, ports: Ports, target: int
) -> Mapping[str, Mapping[str, Any]]:
    model, engine = str(directory / "model"), f"http://{HOST}:{ports.engine}"
    return {
        "kafka": {"dir": str(directory / "kafka"), "port": ports.kafka},
        "topics": {"partitions": 2},
        "stack": {
            "dir": str(directory / "stack"),
            "kafka": True,
            "engine": [_engine(model, ports.engine)],
        },
        "gateway": {
            "engines": [engine],
            "tokenizer": model,
            "port": ports.gateway,
            "run": RUN,
            "group_size": GROUP_SIZE,
            "max_groups": (STALENESS + 1) * GROUPS_PER_BATCH,
            "deadline_s": DEADLINE_S,
            "drain_s": 5,
        },
        "reward": {
            "function": [f"{task.__file__}:{task.score.__name__}"],
            "tokenizer": model,
            "port": ports.reward,
        },
        "train": {
            "run": RUN,
            "model": model,
            "engines": [engine],
            "versions": target,
            "groups_per_batch": GROUPS_PER_BATCH,
            "group_size": GROUP_SIZE,
            "learning_rate": settings.learning_rate,
            "checkpoints": str(directory / "checkpoints"),
            "checkpoint_every": 10,
            "tracker_dir": str(directory / "progress"),
            "threads": 1,
            "port": ports.train,
        },
    }


def _engine(model: str, port: int) -> str:
    variables = [f"{name}={value}" for name, value in ENGINE_VARIABLES.items()]
    server = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    options = ["--model", model, "--host", HOST, "--port", str(port), *ENGINE_OPTIONS]
    return shlex.join(["env", *variables, *server, *options])


def demo_plan(directory: Path, config: Path) -> StackPlan:
    """The trainer waits for the warm start, which runs while the engine starts."""
    plan = StackPlanner(load(StackSettings, "stack", Namespace(config=config), {}), {}).plan()
    if (directory / "model" / "model.safetensors").exists():
        return plan
    command = (sys.executable, "-P", "-m", "steplog.demo.model", str(directory / "model"))
    warm_up = StackPart(name="model", kind="once", command=command)
    parts = [
        msgspec.structs.replace(part, needs=(*part.needs, "model"))
        if part.name == "train"
        else part
        for part in plan.parts
    ]
    kafka = [part for part in parts if part.kind == "kafka"]
    return msgspec.structs.replace(plan, parts=(*kafka, warm_up, *parts[len(kafka) :]))
