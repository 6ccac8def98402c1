"""Weights of a real size to real vLLM servers: correct, whatever dies meanwhile.

    update       every parameter of two engines has the trainer's checksum, and log-probs agree
    engine dies  SIGKILL for one of two engines during an update: the other one gets the version
    trainer dies SIGKILL for the trainer during an update: the next one brings the engine to its version

`python -m bench.gpu.weights send …` is the trainer that is killed.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.checksums import find_differences
from bench.gpu.engines import Engine, running_engines
from bench.gpu.shapes import draw_weights, logprobs, make_model, write_folder
from pool.core.versions import Version
from trainer.weights.fleet import EngineFleet
from trainer.weights.logprob_check import LogprobDifference, compare_logprobs
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import ModuleSource, total_bytes
from trainer.weights.sync import SyncReport

PROMPT = range(1, 17)
KILL_AFTER_S = {"tiny": 0.0, "0.5B": 0.15, "3B": 0.5}
"""Seconds from the pause of an engine until somebody dies, so that weights are on their way."""
LIMITS = {torch.bfloat16: 0.05, torch.float32: 1e-3}
"""Mean difference of log-probs that rounding explains."""
UPDATES = 3


class Trainer:
    """The sending half of a trainer: a model, and the fleet that gets its weights."""

    def __init__(self, shape: str, transport: str, urls: Sequence[str], incarnation: int) -> None:
        self.dtype = torch.bfloat16 if transport == "nccl" else torch.float32
        device = torch.device("cuda", 0) if transport == "nccl" else torch.device("cpu")
        os.environ["NCCL_HOSTID"] = "trainer"
        self.model = make_model(shape, device, self.dtype)
        settings = WeightsSettings(engines=tuple(urls), weights_transport=transport)
        self._fleet = EngineFleet(settings, ModuleSource(self.model))
        self._incarnation = incarnation

    def send(self, version: int) -> tuple[SyncReport, float]:
        draw_weights(self.model, version)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        report = self._fleet.sync(Version(self._incarnation, version))
        return report, time.perf_counter() - started

    def catch_up(self) -> SyncReport | None:
        return self._fleet.catch_up()

    def compare(self, engine: Engine) -> LogprobDifference:
        return compare_logprobs(engine.url, PROMPT, partial(logprobs, self.model))

    def check(self, engine: Engine) -> float:
        """Compares every parameter; returns the mean difference of log-probs."""
        wrong = find_differences(self.model, engine.checksums())
        assert not wrong, f"{len(wrong)} parameters of {engine.url} differ: {wrong[:3]}"
        difference = self.compare(engine)
        difference.check(LIMITS[self.dtype])
        return difference.mean

    def close(self) -> None:
        self._fleet.close()


def run(shape: str, transport: str, folder: Path) -> dict[str, Any]:
    """All scenarios with one pair of engines; returns the figures."""
    dtype = "bfloat16" if transport == "nccl" else "float32"
    model = write_folder(shape, folder / shape, dtype)
    started = time.monotonic()
    with running_engines(model, transport, 2, folder) as engines:
        print(f"{shape}: two engines ready after {time.monotonic() - started:.0f} s", flush=True)
        urls = [engine.url for engine in engines]
        trainer = Trainer(shape, transport, urls, incarnation=1)
        figures = _update(trainer, engines)
        figures |= _kill_engine(trainer, engines, shape)
        trainer.close()
        figures |= _kill_trainer(trainer, engines[0], shape, transport)
    return figures


def _update(trainer: Trainer, engines: list[Engine]) -> dict[str, Any]:
    before = [trainer.compare(engine).mean for engine in engines]
    sent = [trainer.send(version) for version in range(1, UPDATES + 1)]
    assert all(len(report.engines) == len(engines) for report, _ in sent), sent
    after = [trainer.check(engine) for engine in engines]
    report, seconds = min(sent[1:], key=lambda each: each[1])
    size = total_bytes(ModuleSource(trainer.model))
    print(
        f"  update: {seconds:.2f} s, log-probs {max(before):.2f} apart before, {max(after):.4f} after"
    )
    return {
        "parameters": sum(each.numel() for each in trainer.model.parameters()),
        "bytes": size,
        "first_update_s": sent[0][1],
        "update_s": seconds,
        "phases_s": report.seconds,
        "logprob_difference_before": max(before),
        "logprob_difference_after": max(after),
    }


def _kill_engine(trainer: Trainer, engines: list[Engine], shape: str) -> dict[str, Any]:
    survivor, victim = engines
    killer = threading.Thread(target=_kill_during_update, args=(victim, victim.kill, shape))
    killer.start()
    report, seconds = trainer.send(UPDATES + 1)
    killer.join()
    if survivor.url not in report.engines:
        caught_up = trainer.catch_up()
        assert caught_up is not None and survivor.url in caught_up.engines, caught_up
    trainer.check(survivor)
    failure = next(each for each in report.failures if each.url == victim.url)
    print(
        f"  one engine killed in phase {failure.phase}: the other had the version after {seconds:.2f} s"
    )
    return {"engine_killed_s": seconds, "engine_killed_in": failure.phase}


def _kill_trainer(trainer: Trainer, engine: Engine, shape: str, transport: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu.weights", "send", shape, transport, engine.url]
    first = subprocess.Popen([*command, "2", str(UPDATES + 2)])
    _kill_during_update(engine, lambda: first.send_signal(signal.SIGKILL), shape)
    assert first.wait() == -signal.SIGKILL, "the trainer was done before it could be killed"
    started = time.perf_counter()
    subprocess.run([*command, "3", str(UPDATES + 3)], check=True)
    seconds = time.perf_counter() - started
    draw_weights(trainer.model, UPDATES + 3)
    trainer.check(engine)
    print(
        f"  trainer killed: the next one, from its start, had sent its version after {seconds:.1f} s"
    )
    return {"trainer_killed_s": seconds}


def _kill_during_update(engine: Engine, kill: Any, shape: str) -> None:
    while not engine.is_paused():
        time.sleep(0.005)
    time.sleep(KILL_AFTER_S[shape])
    kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["send"])
    parser.add_argument("shape")
    parser.add_argument("transport")
    parser.add_argument("url")
    parser.add_argument("incarnation", type=int)
    parser.add_argument("version", type=int)
    options = parser.parse_args()
    trainer = Trainer(options.shape, options.transport, [options.url], options.incarnation)
    report, _ = trainer.send(options.version)
    assert report.is_complete, report
    trainer.close()


if __name__ == "__main__":
    main()
