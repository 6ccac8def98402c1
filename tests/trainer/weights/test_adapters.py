"""LoRA adapters on their way to engines: alone where there are LoRA layers, else in the whole model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pool.core.versions import Version
from tests.trainer.weights.stub_engine import StubEngine
from trainer.weights.fleet import EngineFleet
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import ModuleSource

RANK = 4
WHOLE = torch.nn.Linear(6, 5)
ADAPTER = torch.nn.Linear(3, RANK, bias=False)


class Adapters(ModuleSource):
    rank = RANK


@contextmanager
def fleet(*ranks: int | None) -> Iterator[tuple[EngineFleet, list[StubEngine]]]:
    """Engines whose LoRA layers take these ranks; None has no such layers."""
    engines = [StubEngine(adapter_rank=rank) for rank in ranks]
    settings: dict[str, Any] = {"weights_look_s": 60, "weights_retry_s": 1e-6}
    urls = tuple(engine.url for engine in engines)
    made = EngineFleet(
        WeightsSettings(engines=urls, **settings), ModuleSource(WHOLE), adapters=Adapters(ADAPTER)
    )
    try:
        yield made, engines
    finally:
        made.close()
        for engine in engines:
            engine.kill()


def received(engine: StubEngine) -> set[str]:
    return {name for worker in engine.weights() for name in worker}


def test_engines_get_adapters_or_whole_models_by_what_they_can_take() -> None:
    with fleet(RANK, None, 16) as (weights, (exact, plain, large)):
        for number in (1, 2):
            version = Version(1, number)
            report = weights.sync(version)
            assert len(report.engines) == 3 and report.passes == 2
            assert report.bytes == 4 * (RANK * 3 + 6 * 5 + 5)
            for engine in (exact, plain, large):
                assert engine.label() == str(version) and not engine.paused()
        # The groups of both kinds are kept.
        assert [engine.seen().count("join") for engine in (exact, plain, large)] == [1, 1, 1]
        assert received(exact) == received(large) == {"weight"}
        assert received(plain) == {"weight", "bias"}


def test_an_engine_restarted_with_lora_layers_gets_adapters() -> None:
    with fleet(None, None) as (weights, (restarted, other)):
        weights.sync(Version(1, 1))
        restarted.kill()
        restarted.adapter_rank = 8
        restarted.start()
        report = weights.catch_up()
        assert report is not None and restarted.url in report.engines
        assert received(restarted) == {"weight"} and restarted.label() == "1.1"
        assert len(weights.sync(Version(1, 2)).engines) == 2
        assert received(other) == {"weight", "bias"}


def test_an_engine_whose_lora_layers_are_too_small_says_how_to_start_it() -> None:
    with fleet(RANK - 1, RANK) as (weights, (small, exact)):
        report = weights.sync(Version(1, 1))
        assert report.engines == (exact.url,)
        (failure,) = report.failures
        assert failure.url == small.url
        assert (
            "up to rank 3, but lora_rank is 4: restart it with --max-lora-rank 4" in failure.reason
        )
        assert small.seen() == []  # it was not even paused


def test_a_run_that_trains_all_weights_asks_no_engine_about_lora() -> None:
    engine = StubEngine(adapter_rank=8)
    try:
        weights = EngineFleet(WeightsSettings(engines=(engine.url,)), ModuleSource(WHOLE))
        assert weights.sync(Version(1, 1)).engines == (engine.url,)
        assert received(engine) == {"weight", "bias"}
        weights.close()
    finally:
        engine.kill()
