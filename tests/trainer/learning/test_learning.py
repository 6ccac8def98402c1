"""The loop learns: agents, gateway, vLLM, Kafka, rewards and trainer, all of them real.

Each seed has its own model, which the engine only gets from the trainer. There is one engine for all
runs, because it takes a minute or two to start.
"""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool.connection import Connection
from pool.core.versions import Version
from steplog.kafka import local_kafka
from tests.tiny_model import build_model
from tests.trainer.learning.evidence import Evidence
from tests.trainer.learning.report import Report
from tests.trainer.learning.training import MAX_AGE, RUN, VERSIONS, Training, train
from tests.trainer.learning.verdict import Verdict, judge
from tests.vllm_engine import Engine, running_vllm

pytestmark = [pytest.mark.broker, pytest.mark.proof, pytest.mark.timeout(1200)]

SEEDS = {1: 0, 2: 1, 3: 2}
"""Each with the staleness that admission aims at."""
LEARNING_RATE = 2e-3
MISMATCH = 0.01
"""Nats that the engine's log-probs may differ from the trainer's, on average, for the same weights."""

Learn = Callable[[int, int, float], Training]


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
    def learn(seed: int, staleness: int, learning_rate: float) -> Training:
        prefix = f"learning-{uuid.uuid4().hex[:8]}."
        connection = Connection(bootstrap=kafka.bootstrap, topic_prefix=prefix)
        model = build_model(tmp_path / "model", seed=seed)
        return train(
            connection,
            engine,
            model,
            tmp_path,
            seed=seed,
            learning_rate=learning_rate,
            staleness=staleness,
        )

    return learn


def verdict_on(evidence: Evidence) -> Verdict:
    return judge([made.rewards for made in evidence.trained])


@pytest.mark.parametrize(("seed", "staleness"), SEEDS.items())
def test_rewards_go_up(learn: Learn, report: Report, seed: int, staleness: int) -> None:
    training = learn(seed, staleness, LEARNING_RATE)
    verdict = verdict_on(training.evidence)
    report.add(f"seed {seed}, eta {staleness}", verdict, training.evidence)
    assert verdict.learned, verdict
    check_run(training)
    compared = mismatches(training.evidence)
    assert all(value < MISMATCH for value in compared)
    # With the target of 0 most versions were sampled by their predecessor; without, the first was.
    assert len(compared) > (VERSIONS / 2 if staleness == 0 else 0)


def test_nothing_is_learned_at_learning_rate_0(learn: Learn, report: Report) -> None:
    training = learn(1, 2, 0.0)
    verdict = verdict_on(training.evidence)
    report.add("rate 0, eta 2", verdict, training.evidence)
    assert not verdict.learned, verdict
    check_run(training)
    # All versions are the same, so engine and trainer agree on every token, however old.
    for made in training.evidence.trained:
        assert made.outcome.metrics["logprob_difference"] < MISMATCH


def mismatches(evidence: Evidence) -> list[float]:
    """Mean |c - b| of the tokens that the newest version had sampled, where there are any."""
    name = "logprob_difference_age_0"
    metrics = [made.outcome.metrics for made in evidence.trained]
    return [found[name] for found in metrics if name in found]


def check_run(training: Training) -> None:
    check_versions(training.evidence)
    check_i8_generating_versions(training.evidence)
    check_i8_ages(training.evidence)
    check_i9_labels(training.labels)


def check_versions(evidence: Evidence) -> None:
    """Each was made, opened and live, in order; and its Outcome says what the log says."""
    wanted = list(range(VERSIONS + 1))
    for phase in ("opened", "live"):
        assert [r.version for r in evidence.policy if r.phase == phase] == wanted, phase
    assert [made.version for made in evidence.trained] == wanted[1:]
    for made in evidence.trained:
        metrics = made.outcome.metrics
        assert metrics["trajectories"] == len(made.rewards)
        assert metrics["reward_mean"] == pytest.approx(sum(made.rewards) / len(made.rewards))


def check_i8_generating_versions(evidence: Evidence) -> None:
    """Whoever sampled a Step was opened, and is no newer than its offset allows."""
    for place, step in evidence.steps.items():
        by_offset = evidence.marks.version_at(place)
        assert step.run == RUN and step.segments and by_offset is not None
        for segment in step.segments:
            assert segment.incarnation == 1
            assert evidence.marks.is_opened(segment.version)
            assert segment.version <= by_offset


def check_i8_ages(evidence: Evidence) -> None:
    """No token was trained that is older than allowed."""
    for made in evidence.trained:
        for step in made.steps:
            assert step.source is not None
            assert evidence.steps[step.source].step_id == step.step_id
            oldest = min(segment.version for segment in step.segments)
            assert made.version - 1 - oldest <= MAX_AGE


def check_i9_labels(labels: list[str]) -> None:
    """The engine's version never goes back within an incarnation, and ends as the last one."""
    versions = [version for label in labels if (version := Version.parse(label)) is not None]
    assert versions == sorted(versions)
    assert {version.incarnation for version in versions} == {1}
    assert versions[-1].number == VERSIONS
