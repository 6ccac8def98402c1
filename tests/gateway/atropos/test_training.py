"""The loop without a foreign trainer: an Atropos environment, the gateway, vLLM and `steplog train`.

All of them are real processes, because nothing less shows that the environment samples new weights.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import LEDGER, REWARDED, STEPS
from schemas import Decision, Outcome, ScoredGroup, Step
from tests import processes
from tests.gateway.atropos.running import Client, until
from tests.gateway.real_engine.calls import REAL
from tests.gateway.running import RunningGateway, running_gateway
from tests.pool.log import committed, records
from tests.tiny_model import build_model_apart
from tests.trainer.learning.training import Trainer, running_trainer
from tests.vllm_engine import Engine, running_vllm

pytest.importorskip("atroposlib")
pytestmark = REAL

RUN = "letters"
VERSIONS = 3
GROUPS_PER_BATCH = 2
LIMIT_S = 400.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_apart(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with running_vllm(model, "--weight-transfer-config", '{"backend":"gloo"}') as running:
        yield running


@contextmanager
def serving_environment(gateway: RunningGateway, model: Path, log: Path) -> Iterator[None]:
    options = {
        "env.rollout_server_url": f"{gateway.url}/atropos",
        "env.tokenizer_name": str(model),
        "openai.tokenizer_name": str(model),
        "openai.base_url": f"{gateway.url}/v1",
    }
    command = [sys.executable, str(Path(__file__).with_name("letters_env.py")), "serve"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    with log.open("wb") as output:
        env = processes.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            preload="atropos",
        )
    try:
        yield
    finally:
        env.kill()
        env.wait()


def has_ended(trainer: Trainer, env_log: Path) -> bool:
    assert "Traceback" not in env_log.read_text(), env_log.read_text()[-3000:]
    return trainer.has_ended()


def test_an_environment_trains_the_model_that_it_samples(
    connection: Connection, engine: Engine, model: Path, tmp_path: Path
) -> None:
    topics.create(connection, partitions=2)
    engine.label("default")
    env_log = tmp_path / "env.log"
    options = ("--run", RUN, "--atropos", "--atropos-train", "--unbound-channel", "envs")
    training = ("--model", str(model), "--learning-rate", "2e-3")
    with (
        running_trainer(
            connection,
            engine,
            tmp_path,
            *training,
            versions=VERSIONS,
            groups_per_batch=GROUPS_PER_BATCH,
        ) as trainer,
        running_gateway(connection, [engine.url], model, *options) as gateway,
        serving_environment(gateway, model, env_log),
    ):
        until(lambda: has_ended(trainer, env_log), LIMIT_S)
        assert trainer.process.returncode == 0, trainer.log.read_text()[-3000:]
        atropos = Client(gateway.port, "/atropos")
        until(lambda: atropos.get("/status")["current_step"] == VERSIONS)

    ledger = committed(connection, LEDGER)
    batches = [r for r in ledger if isinstance(r, Decision) and r.version is not None]
    posted = {r.prompt_uid for r in records(connection, REWARDED) if isinstance(r, ScoredGroup)}
    trained = {g.prompt_uid for batch in batches for g in batch.groups if g.verdict == "train"}
    assert len(trained) == VERSIONS * GROUPS_PER_BATCH and trained <= posted
    first = next(r for r in ledger if isinstance(r, Outcome))
    assert first.metrics["reward_mean"] > 0
    sampled = [r for r in records(connection, STEPS) if isinstance(r, Step)]
    versions = {segment.version for step in sampled for segment in step.segments}
    assert {step.channel for step in sampled} == {"envs"}
    assert len(versions) > 1, "it samples from the weights that its groups have trained"
