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


@pytest.mark.parametrize("name", ["reward", "trainer", "pool", "gateway", "schemas"])
def test_a_file_of_the_users_with_the_name_of_a_package_of_ours_is_no_riddle(
    tmp_path: Path, name: str
) -> None:
    """The public names still work; the command says which file is in its way. It needs processes of
    its own, because a module is imported once only."""
    hiding = tmp_path / f"{name}.py"
    hiding.write_text("from steplog import Environment, Reward, Trajectory\nMINE = 1\n")
    code = f"import {name}; from steplog import Client, RewardFailed; print({name}.MINE)"
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
    command = [sys.executable, "-m", "steplog", "topics", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert told.returncode == 1
    assert told.stderr == (
        f"steplog: {hiding} hides steplog's own package {name}: rename it, or start `steplog` where "
        "Python does not find it.\n"
    )


@pytest.mark.parametrize("name", ["Environment", "Reward", "Trajectory"])
def test_importing_a_public_name_loads_nothing_heavy(name: str) -> None:
    code = f"import sys; from steplog import {name}; print(sorted({HEAVY} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
