"""The demo's stack: a settings file that `steplog up` could read too, and a part that makes the
model."""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from steplog.demo import task
from steplog.demo.engine import DemoEngine
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


class Ports(NamedTuple):
    kafka: int
    engine: int
    gateway: int
    reward: int
    train: int


def write_settings(
    settings: DemoSettings, engine: DemoEngine, directory: Path, ports: Ports, target: int
) -> Path:
    file = directory / "steplog.toml"
    tables = _tables(settings, engine, directory, ports, target)
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
    settings: DemoSettings, engine: DemoEngine, directory: Path, ports: Ports, target: int
) -> Mapping[str, Mapping[str, Any]]:
    model, url = str(directory / "model"), f"http://{HOST}:{ports.engine}"
    return {
        "kafka": {"dir": str(directory / "kafka"), "port": ports.kafka},
        "topics": {"partitions": 2},
        "stack": {
            "dir": str(directory / "stack"),
            "kafka": True,
            "engine": [engine.command(model, HOST, ports.engine)],
        },
        "gateway": {
            "engines": [url],
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
            "engines": [url],
            "versions": target,
            "groups_per_batch": GROUPS_PER_BATCH,
            "group_size": GROUP_SIZE,
            "learning_rate": settings.learning_rate,
            "checkpoints": str(directory / "checkpoints"),
            "checkpoint_every": 10,
            "tracker_dir": str(directory / "progress"),
            "port": ports.train,
            **engine.trainer_settings,
        },
    }


def demo_plan(engine: DemoEngine, directory: Path, config: Path) -> StackPlan:
    """The trainer waits for the warm start, which runs while the engine starts."""
    plan = StackPlanner(load(StackSettings, "stack", Namespace(config=config), {}), {}).plan()
    is_warm = (directory / "model" / "model.safetensors").exists()
    parts = [
        _trainer(part, engine, is_warm) if part.name == "train" else part for part in plan.parts
    ]
    if not is_warm:
        after_kafka = sum(part.kind == "kafka" for part in parts)
        parts.insert(after_kafka, _warm_start(directory / "model"))
    return msgspec.structs.replace(plan, parts=tuple(parts))


def _trainer(part: StackPart, engine: DemoEngine, is_warm: bool) -> StackPart:
    needs = part.needs if is_warm else (*part.needs, "model")
    return msgspec.structs.replace(part, needs=needs, variables=engine.trainer_variables)


def _warm_start(folder: Path) -> StackPart:
    command = (sys.executable, "-P", "-m", "steplog.demo.model", str(folder))
    return StackPart(name="model", kind="once", command=command)
