"""The loop learns: agents, gateway, vLLM, Kafka, rewards and trainer, all of them real.

Each seed has its own model, which the engine only gets from the trainer. There is one engine for all
runs, because it takes a minute or two to start.
"""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool.connection import Connection
from pool.versions import Version
from steplog import local_kafka
from tests.tiny_model import build_model
from tests.trainer.learning.evidence import Evidence
from tests.trainer.learning.report import Report
from tests.trainer.learning.training import MAX_AGE, RUN, VERSIONS, Training, train
from tests.trainer.learning.verdict import Verdict, judge
from tests.vllm_engine import Engine, running_vllm

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1200)]

SEEDS = (1, 2, 3)
LEARNING_RATE = 2e-3
NO_RATE = 1e-12
"""Moves no weight that float32 could tell."""
MISMATCH = 0.01
"""Nats that the engine's log-probs may differ from the trainer's, on average, for the same weights."""

Learn = Callable[[int, float], Training]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = build_model(tmp_path_factory.mktemp("model"))
    with running_vllm(model, "--weight-transfer-config", '{"backend":"gloo"}') as running:
        yield running


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config) -> Iterator[Report]:
    report = Report()
    yield report
    report.show(pytestconfig)


@pytest.fixture
def learn(kafka: local_kafka.Broker, engine: Engine, tmp_path: Path) -> Learn:
    def learn(seed: int, learning_rate: float) -> Training:
        prefix = f"learning-{uuid.uuid4().hex[:8]}."
        connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=prefix)
        model = build_model(tmp_path / "model", seed=seed)
        return train(connection, engine, model, tmp_path, seed=seed, learning_rate=learning_rate)

    return learn


def verdict_on(evidence: Evidence) -> Verdict:
    return judge([made.rewards for made in evidence.trained])


@pytest.mark.parametrize("seed", SEEDS)
def test_rewards_go_up(learn: Learn, report: Report, seed: int) -> None:
    training = learn(seed, LEARNING_RATE)
    verdict = verdict_on(training.evidence)
    report.add(f"seed {seed}", verdict, training.evidence)
    assert verdict.learned, verdict
    check_versions(training)
    check_outcomes(training.evidence)
    check_i8_ages(training.evidence)
    check_i9_labels(training.labels)


def test_nothing_is_learned_at_learning_rate_0(learn: Learn, report: Report) -> None:
    training = learn(SEEDS[0], NO_RATE)
    verdict = verdict_on(training.evidence)
    report.add("rate 0", verdict, training.evidence)
    assert not verdict.learned, verdict
    check_versions(training)


def check_versions(training: Training) -> None:
    """Each was made, opened and live, in order."""
    wanted = list(range(VERSIONS + 1))
    assert [made.version for made in training.evidence.trained] == wanted[1:]
    for phase in ("opened", "live"):
        found = [r.version for r in training.evidence.policy if r.phase == phase]
        assert found == wanted, phase


def check_outcomes(evidence: Evidence) -> None:
    """What the trainer says of its batches is what the log says; and engine and trainer agree about
    the weights of every version."""
    compared = 0
    for made in evidence.trained:
        metrics = made.outcome.metrics
        assert metrics["trajectories"] == len(made.rewards)
        assert metrics["reward_mean"] == pytest.approx(sum(made.rewards) / len(made.rewards))
        if "logprob_difference_age_0" in metrics:
            assert metrics["logprob_difference_age_0"] < MISMATCH
            compared += 1
    assert compared, "no token was trained by the version that sampled it"


def check_i8_ages(evidence: Evidence) -> None:
    """No record is newer than its offset allows, and no trained token too old."""
    for made in evidence.trained:
        for step in made.steps:
            assert step.run == RUN and step.source is not None and step.segments
            versions = [segment.version for segment in step.segments]
            assert all(evidence.marks.is_opened(version) for version in versions)
            by_offset = evidence.marks.version_at(step.source)
            assert by_offset is not None and max(versions) <= by_offset
            assert made.version - 1 - min(versions) <= MAX_AGE


def check_i9_labels(labels: list[str]) -> None:
    """The engine's version never goes back within an incarnation, and ends as the last one."""
    versions = [version for label in labels if (version := Version.parse(label)) is not None]
    assert versions == sorted(versions)
    assert {version.incarnation for version in versions} == {1}
    assert versions[-1].number == VERSIONS
