"""An environment in front of the real vLLM: through the gateway, and as any OpenAI-style URL."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pool.connection import Connection
from pool.core.prompts import full_prompts
from schemas import Step
from schemas.packing import unpack_ids, unpack_logprobs
from tests.gateway.real_engine.calls import REAL
from tests.gateway.running import running_gateway
from tests.steplog.environment.recorded_log import RecordedLog, lines, prompts
from tests.steplog.environment.test_examples import run
from tests.tiny_model import STRIPPING, build_model_apart
from tests.vllm_engine import NAME, Engine, running_vllm

pytestmark = REAL

GAME = ("--groups", "2", "--group-size", "3", "--turns", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_apart(tmp_path_factory.mktemp("model"), STRIPPING)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with running_vllm(model) as running:
        yield running


def sequences(steps: list[Step]) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each Step."""
    whole = full_prompts(steps)
    return [
        (list(unpack_ids(whole[step.step_id])), list(unpack_ids(step.response_ids)))
        for step in steps
    ]


def test_served_turns_extend_each_other_exactly(
    log: Connection, engine: Engine, model: Path
) -> None:
    with running_gateway(log, [engine.url], model) as gateway:
        run("guess_the_number", "serve", "--gateway", gateway.url, "--jsonl", *GAME)
    groups = RecordedLog(log, prompts(Path("kept/rollouts.jsonl"))).complete_groups(3)
    assert len(groups) == 2
    for told in [told for members in groups.values() for told in members]:
        assert told.end.status in ("completed", "truncated") and told.end.reward is not None
        for step in told.steps:
            logprobs = unpack_logprobs(step.response_logprobs)
            assert len(logprobs) == len(unpack_ids(step.response_ids)) > 0
        for (prompt, response), (later, _) in pairwise(sequences(told.steps)):
            assert later[: len(prompt) + len(response)] == prompt + response


def test_vllm_itself_is_an_openai_style_url(engine: Engine) -> None:
    run("guess_the_number", "process", "--url", f"{engine.url}/v1", "--model", NAME, *GAME)
    kept = lines(Path("kept/process/rollouts.jsonl"))
    rollouts = [rollout for line in kept for rollout in line["rollouts"]]
    assert len(rollouts) == 6
    assert all(rollout["tokens"] > 0 and rollout["reward"] is not None for rollout in rollouts)
