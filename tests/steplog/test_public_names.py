"""What users may import from `steplog`. A name that goes from this list breaks their code."""

import subprocess
import sys
from pathlib import Path

import pytest

import steplog

PUBLIC = [
    "Agent",
    "Client",
    "Ending",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentSettings",
    "EvaluationResult",
    "GatewayLost",
    "GatewayRefused",
    "Group",
    "OpenTrajectory",
    "Reward",
    "RewardFailed",
    "RewardUnavailable",
    "Rollout",
    "Trajectory",
    "TrajectoryStep",
    "TryAgain",
    "evaluate",
    "process",
    "serve",
]
HEAVY = {"torch", "confluent_kafka", "aiokafka", "transformers"}


def test_the_public_names_are_exactly_these() -> None:
    assert steplog.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(steplog))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from steplog import {name}", namespace)
    assert getattr(namespace[name], "__name__", None) == name


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="module 'steplog' has no attribute 'Trainer'"):
        steplog.Trainer  # noqa: B018


def test_the_package_is_typed() -> None:
    assert Path(steplog.__file__).with_name("py.typed").exists()


@pytest.mark.parametrize("name", ["Environment", "Reward", "Trajectory"])
def test_importing_a_public_name_loads_nothing_heavy(name: str) -> None:
    code = f"import sys; from steplog import {name}; print(sorted({HEAVY} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
