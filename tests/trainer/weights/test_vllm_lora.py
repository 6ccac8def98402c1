"""LoRA adapters in the real vLLM: afterwards it computes what the trainer computes with them."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pool.core.versions import Version
from tests.tiny_model import build_model
from tests.vllm_engine import Engine, running_vllm
from trainer.weights import logprob_check
from trainer.weights.engine import EngineControl
from trainer.weights.fleet import EngineFleet
from trainer.weights.logprob_check import LogprobDifference, LogprobMismatch
from trainer.weights.settings import WeightsSettings

pytest.importorskip("peft", reason="LoRA needs peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RANK = 8
STARTED = (
    *("--weight-transfer-config", '{"backend": "gloo"}'),
    *("--enable-lora", "--max-lora-rank", str(RANK)),
)
PROMPT = list(b"Which adapter is this?")
CLOSE = 1e-4
LIMIT = 60.0
TRIES = 12


class Trainer:
    """A learner whose adapters change at random, and its way to engines."""

    def __init__(self, folder: Path) -> None:
        import torch

        from trainer.algorithm.settings import LossSettings
        from trainer.learner import Learner
        from trainer.model.settings import LearnerSettings

        self.torch = torch
        settings = LearnerSettings(lora_rank=RANK)
        self.learner = Learner.from_folder(folder, settings, LossSettings())

    def weights(self, engine: Engine, **settings: Any) -> EngineFleet:
        limits = {"weights_buffer_bytes": 5_000, "weights_retry_s": 0.01, "weights_look_s": LIMIT}
        made = WeightsSettings.model_validate({"engines": (engine.url,), **limits, **settings})
        return EngineFleet(made, self.learner.weights(), adapters=self.learner.adapters())

    def step(self) -> None:
        with self.torch.no_grad():
            for parameter in self.learner.trained.parameters.values():
                parameter.add_(self.torch.randn_like(parameter) * 0.1)

    def compare(self, engine: Engine) -> LogprobDifference:
        return logprob_check.compare_logprobs(engine.url, PROMPT, self.learner.logprobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running_vllm(folder, *STARTED) as running:
        yield running


@pytest.fixture
def trainer(folder: Path) -> Trainer:
    return Trainer(folder)


def label(engine: Engine) -> str:
    return EngineControl(engine.url).label(LIMIT, "look")


def test_an_engine_computes_with_the_adapters_that_it_was_sent(
    engine: Engine, trainer: Trainer
) -> None:
    assert trainer.compare(engine).max < CLOSE  # new adapters change nothing, nor does having none
    weights = trainer.weights(engine)
    adapters = trainer.learner.adapters()
    assert adapters is not None
    for number in range(1, 3):
        trainer.step()
        with pytest.raises(LogprobMismatch, match="does not compute with the trainer's weights"):
            trainer.compare(engine).check(CLOSE)
        report = weights.sync(Version(1, number))
        assert report.engines == (engine.url,)
        assert report.bytes == sum(parameter.bytes for parameter in adapters.metadata())
        assert label(engine) == f"1.{number}"
        assert trainer.compare(engine).max < CLOSE
    weights.close()


def test_a_call_that_runs_over_the_update_goes_on_with_the_new_adapters(
    engine: Engine, trainer: Trainer
) -> None:
    """Calls follow each other, and updates too, until one has met another."""
    weights = trainer.weights(engine)
    is_over = threading.Event()
    seen: list[list[str]] = []

    def ask() -> None:
        sampling = {"max_tokens": 700, "temperature": 1.0, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": False}
        while not is_over.is_set():
            (choice,) = engine.post("/inference/v1/generate", body)["choices"]
            assert len(choice["token_ids"]) == 700
            seen.append([span["version"] for span in choice["weight_versions"]])

    def met() -> list[list[str]]:
        return [versions for versions in seen if len(versions) > 1]

    weights.sync(Version(2, 1))
    labels = ["2.1"]
    with ThreadPoolExecutor() as executor:
        call = executor.submit(ask)
        try:
            while not met() and len(labels) < TRIES:
                sampled = engine.metric("vllm:generation_tokens_total")
                while engine.metric("vllm:generation_tokens_total") == sampled:
                    assert not call.done()
                trainer.step()
                labels.append(f"2.{len(labels) + 1}")
                weights.sync(Version(2, len(labels)))
        finally:
            is_over.set()
    call.result()
    assert met()
    for versions in met():
        first = labels.index(versions[0])
        assert versions == labels[first : first + len(versions)]
    assert trainer.compare(engine).max < CLOSE
    weights.close()


def test_an_update_that_broke_off_changes_nothing(engine: Engine, trainer: Trainer) -> None:
    class Broken:
        """Ends in the middle, as when a trainer dies."""

        def __init__(self, source: Any) -> None:
            self.rank, self.metadata, self._source = source.rank, source.metadata, source

        def __iter__(self) -> Iterator[Any]:
            yield from list(self._source)[:3]
            raise KeyError("the trainer died")

    settings = WeightsSettings(engines=(engine.url,), weights_buffer_bytes=5_000)
    source = Broken(trainer.learner.adapters())
    broken = EngineFleet(settings, trainer.learner.weights(), adapters=source)
    with pytest.raises(KeyError):
        broken.sync(Version(3, 1))
    assert EngineControl(engine.url).read_state(LIMIT).is_paused
    trainer.step()
    weights = trainer.weights(engine)
    assert weights.sync(Version(4, 1)).engines == (engine.url,)
    assert trainer.compare(engine).max < CLOSE
    weights.close()


def test_weights_of_a_whole_model_are_refused_with_what_to_do(
    engine: Engine, trainer: Trainer
) -> None:
    whole = EngineFleet(
        WeightsSettings(engines=(engine.url,), weights_look_s=LIMIT), trainer.learner.weights()
    )
    (failure,) = whole.sync(Version(5, 1)).failures
    assert "takes only LoRA adapters: set the trainer's lora_rank" in failure.reason
    assert label(engine) == "none"
    weights = trainer.weights(engine)
    assert weights.sync(Version(5, 2)).engines == (engine.url,)
    assert trainer.compare(engine).max < CLOSE
    weights.close()


def test_an_engine_that_was_restarted_catches_up(
    engine: Engine, trainer: Trainer, folder: Path
) -> None:
    """It was restarted without the logprobs mode that training needs, and is refused for that."""
    weights = trainer.weights(engine)
    trainer.step()
    assert weights.sync(Version(6, 1)).engines == (engine.url,)
    os.killpg(engine.pid, signal.SIGKILL)
    started = (*STARTED, "--logprobs-mode", "raw_logprobs")
    with running_vllm(folder, *started, port=int(engine.url.rpartition(":")[2])) as again:
        assert label(again) == "default"
        healed = weights.catch_up()
        assert healed is not None and healed.engines == (again.url,)
        assert label(again) == "6.1"
        difference = trainer.compare(again)
        assert difference.mean_without_temperature < CLOSE < difference.mean
        with pytest.raises(LogprobMismatch, match="restart it with --logprobs-mode processed_log"):
            difference.check(limit=1.0)
    weights.close()
