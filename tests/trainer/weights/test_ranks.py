"""Ranks that gather shards together read the source equally often, whatever happens to engines."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pool.core.versions import Version
from tests.conftest import free_port
from tests.trainer.weights.stub_engine import running_stubs
from trainer.weights.fleet import EngineFleet
from trainer.weights.ranks import AnnouncedSource, RankGroup, read_along
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import Parameter
from trainer.weights.sync import SyncReport

SIZE = 40


class Gathering:
    """Every tensor is a collective: a rank that reads too little or too much would wait for ever."""

    def __init__(self) -> None:
        self.read = 0

    def metadata(self) -> list[Parameter]:
        return [Parameter(f"layer.{place}", torch.float32, (SIZE,)) for place in range(8)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in self.metadata():
            whole = torch.ones(SIZE) * (dist.get_rank() + 1)
            dist.all_reduce(whole)
            self.read += 1
            yield parameter.name, whole


def rank(place: int, port: int, urls: tuple[str, ...], told: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=place, world_size=2)
    source = Gathering()
    # Buffers of one tensor: the death comes in the middle of a pass.
    settings = WeightsSettings(engines=urls if place == 0 else (), weights_buffer_bytes=10)
    weights = EngineFleet(settings, source, ranks=RankGroup())
    report = weights.sync(Version(1, 1))
    idle = weights.catch_up()
    told.put((place, source.read, report, idle))
    told.close()
    told.join_thread()
    dist.destroy_process_group()


def test_ranks_read_along_also_in_the_repeat_after_a_failure() -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.trainer.weights.stub_engine"])
    with running_stubs(1, 1) as (good, bad):
        bad.fault("midway", "die")
        told = processes.Queue()
        port = free_port()
        ranks = [
            processes.Process(target=rank, args=(place, port, (good.url, bad.url), told))
            for place in range(2)
        ]
        for each in ranks:
            each.start()
        results: dict[int, tuple[int, SyncReport, SyncReport | None]] = {}
        for _ in ranks:
            place, *rest = told.get(timeout=120)
            results[place] = (rest[0], rest[1], rest[2])
        for each in ranks:
            each.join()
        assert good.label() == "1.1" and not good.paused()
        assert good.weights() == [{f"layer.{place}": 3.0 * SIZE for place in range(8)}]
    assert results[0] == results[1]
    read, report, _ = results[0]
    assert report.engines == (good.url,) and report.passes == 2 and read == 16


def test_other_ranks_read_the_source_that_is_announced() -> None:
    class Announcing:
        messages: Iterator[bytes | int] = iter([1, 0, 1, b"the report"])

        def receive(self) -> bytes | int:
            return next(self.messages)

    class Counted:
        passes = 0

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.passes += 1
            return iter(())

    whole, adapters = Counted(), Counted()
    assert read_along([whole, adapters], Announcing()) == b"the report"  # type: ignore
    assert (whole.passes, adapters.passes) == (1, 2)


def test_a_pass_that_broke_off_is_read_to_its_end() -> None:
    class Several:
        is_leader, is_single = True, False
        announced = 0

        def announce_pass(self, _: int) -> None:
            self.announced += 1

    class Plain:
        read = 0

        def metadata(self) -> list[Parameter]:
            return []

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for place in range(5):
                self.read += 1
                yield str(place), torch.zeros(1)

    plain, ranks = Plain(), Several()
    source = AnnouncedSource(plain, ranks)  # type: ignore[arg-type]
    next(iter(source))
    source.complete_pass()
    assert (plain.read, ranks.announced, source.passes) == (5, 1, 1)
