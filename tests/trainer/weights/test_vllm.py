"""Weights in the real vLLM: afterwards it computes what the trainer computes."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pool.core.versions import Version
from tests.tiny_model import build_model
from tests.vllm_engine import Engine, running_vllm
from trainer.weights import logprob_check, transfer_group
from trainer.weights.engine import EngineControl
from trainer.weights.fleet import EngineFleet
from trainer.weights.logprob_check import LogprobDifference, LogprobMismatch
from trainer.weights.settings import WeightsSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

GLOO = ("--weight-transfer-config", '{"backend": "gloo"}')
PROMPT = list(b"Which weights are these?")
CLOSE = 1e-4
LIMIT = 60.0
TRIES = 12


class Trainer:
    """A model that changes, and its way to engines."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from trainer.weights.source import ModuleSource

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert self.model.lm_head.weight is self.model.model.embed_tokens.weight
        self.source = ModuleSource(self.model)

    def weights(self, *engines: Engine, **settings: Any) -> EngineFleet:
        urls = tuple(engine.url for engine in engines)
        # An engine that computes often takes all cores, and then its server says nothing for seconds.
        limits = {"weights_buffer_bytes": 30_000, "weights_retry_s": 0.01, "weights_look_s": LIMIT}
        made = WeightsSettings.model_validate({"engines": urls, **limits, **settings})
        return EngineFleet(made, self.source)

    def step(self) -> None:
        with self.torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(self.torch.randn_like(parameter) * 0.05)

    def logprobs(self, ids: NDArray[np.int32], temperature: float) -> NDArray[np.float32]:
        with self.torch.no_grad():
            row = self.torch.tensor(ids.astype(np.int64))
            logits = self.model(row[None]).logits[0, :-1].double() / temperature
            values = self.torch.log_softmax(logits, -1).gather(1, row[1:, None])[:, 0]
        return np.asarray([0.0, *values.tolist()], dtype=np.float32)

    def compare(self, engine: Engine) -> LogprobDifference:
        return logprob_check.compare_logprobs(engine.url, PROMPT, self.logprobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running_vllm(folder, *GLOO) as running:
        yield running


@pytest.fixture
def trainer(folder: Path) -> Trainer:
    return Trainer(folder)


def label(engine: Engine) -> str:
    return EngineControl(engine.url).label(LIMIT, "look")


def test_an_engine_computes_with_the_weights_that_it_was_sent(
    engine: Engine, trainer: Trainer
) -> None:
    weights = trainer.weights(engine)
    for number in range(1, 3):
        trainer.step()
        with pytest.raises(LogprobMismatch, match="does not compute with the trainer's weights"):
            trainer.compare(engine).check(CLOSE)
        report = weights.sync(Version(1, number))
        assert report.engines == (engine.url,)
        assert label(engine) == f"1.{number}"
        assert trainer.compare(engine).max < CLOSE
    weights.close()


def test_a_call_that_runs_over_the_update_has_a_segment_of_each_version(
    engine: Engine, trainer: Trainer
) -> None:
    """An engine often takes all cores until it is done, and then the update meets none that has begun.
    So calls follow each other, and updates too, until one has met another."""
    weights = trainer.weights(engine)
    over = threading.Event()
    seen: list[list[str]] = []

    def ask(tokens: int) -> None:
        sampling = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": False}
        while not over.is_set():
            (choice,) = engine.post("/inference/v1/generate", body)["choices"]
            assert len(choice["token_ids"]) == tokens
            seen.append([span["version"] for span in choice["weight_versions"]])

    def is_met() -> bool:
        return any(len(versions) > 1 for versions in seen)

    weights.sync(Version(2, 1))
    labels = ["2.1"]
    with ThreadPoolExecutor() as executor:
        # Of several lengths: they do not end together.
        calls = [executor.submit(ask, tokens) for tokens in (900, 700, 500)]
        try:
            while not is_met() and len(labels) < TRIES:
                sampled = engine.metric("vllm:generation_tokens_total")
                while engine.metric("vllm:generation_tokens_total") == sampled:
                    assert not any(call.done() for call in calls)
                trainer.step()
                labels.append(f"2.{len(labels) + 1}")
                weights.sync(Version(2, len(labels)))
        finally:
            over.set()
    for call in calls:
        call.result()
    assert is_met()
    for versions in seen:
        first = labels.index(versions[0])
        assert versions == labels[first : first + len(versions)]
    assert trainer.compare(engine).max < CLOSE
    weights.close()


@pytest.mark.parametrize("left_at", ["start", "update"])
def test_an_update_that_broke_off_leaves_nothing_in_the_next(
    engine: Engine, trainer: Trainer, left_at: str
) -> None:
    """A trainer died; the next one, of a later incarnation, finds an engine between two versions."""
    incarnation = {"start": 3, "update": 5}[left_at]
    control = EngineControl(engine.url)
    if left_at == "start":
        control.pause(LIMIT)
        control.start(LIMIT)
    else:
        with pytest.raises(KeyError):
            EngineFleet(
                WeightsSettings(engines=(engine.url,), weights_buffer_bytes=10_000),
                Broken(trainer.source),
            ).sync(Version(incarnation - 1, 1))
    assert control.read_state(LIMIT).is_paused
    trainer.step()
    assert trainer.weights(engine).sync(Version(incarnation, 1)).engines == (engine.url,)
    assert trainer.compare(engine).max < CLOSE
    assert not control.read_state(LIMIT).is_paused


class Broken:
    """Ends in the middle, inside a layer."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def metadata(self) -> Any:
        return self._source.metadata()

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._source)[:9]
        raise KeyError("the trainer died")


def test_an_engine_killed_during_a_sync_rejoins_with_the_newest_weights(
    engine: Engine, trainer: Trainer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_vllm(folder, *GLOO) as other:
        weights = trainer.weights(engine, other)
        trainer.step()
        assert len(weights.sync(Version(6, 1)).engines) == 2
        assert trainer.compare(other).max < CLOSE
        # Between the start of its update and the first byte.
        start = transfer_group.TransferGroup.start_weight_update

        def start_and_kill(self: transfer_group.TransferGroup) -> None:
            start(self)
            if len(self.members) == 2:
                os.killpg(other.pid, signal.SIGKILL)

        monkeypatch.setattr(transfer_group.TransferGroup, "start_weight_update", start_and_kill)
        trainer.step()
        report = weights.sync(Version(6, 2))
        monkeypatch.undo()
        assert report.engines == (engine.url,)
        assert [failure.url for failure in report.failures] == [other.url]
        assert trainer.compare(engine).max < CLOSE
        assert label(engine) == "6.2"
    with running_vllm(folder, *GLOO, port=int(other.url.rpartition(":")[2])) as again:
        assert label(again) == "default"
        healed = weights.catch_up()
        assert healed is not None and other.url in healed.engines
        assert trainer.compare(again).max < CLOSE
        assert label(again) == label(engine) == "6.2"
        trainer.step()
        assert len(weights.sync(Version(6, 3)).engines) == 2
        assert trainer.compare(engine).max < CLOSE and trainer.compare(again).max < CLOSE
    weights.close()


@pytest.mark.parametrize("keep_kv", [False, True])
def test_keys_and_values_are_found_after_an_update_only_if_they_are_kept(
    engine: Engine, trainer: Trainer, keep_kv: bool
) -> None:
    incarnation = 8 + keep_kv
    weights = trainer.weights(engine, keep_kv=keep_kv)
    sampling = {"max_tokens": 1, "temperature": 1.0}
    body = {"token_ids": PROMPT * 20, "sampling_params": sampling, "cache_salt": f"{incarnation}.1"}

    def ask() -> float:
        """Tokens of the prompt that were found in the cache."""
        before = engine.metric("vllm:prefix_cache_hits_total")
        engine.post("/inference/v1/generate", body)
        return engine.metric("vllm:prefix_cache_hits_total") - before

    weights.sync(Version(incarnation, 1))
    assert ask() == 0
    assert ask() > 0
    trainer.step()
    weights.sync(Version(incarnation, 2))
    assert (ask() > 0) == keep_kv
    weights.close()
