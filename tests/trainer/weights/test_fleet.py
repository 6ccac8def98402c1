"""The sync of a version to several engines: in order, and when something goes wrong."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pool.core.versions import Version
from tests.trainer.weights.stub_engine import StubEngine, running_stubs
from trainer.weights.fleet import EngineFleet, EngineList
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import ModuleSource
from trainer.weights.sync import SyncReport

ORDER = ["pause", "join", "start", "update", "finish", "resume"]
AGAIN = ["pause", "start", "update", "finish", "resume"]
"""In a group that exists already."""
LIMITS = (1.5, 15.0)
"""Seconds that a phase may take where one engine hangs: the other must be through with it by then, and
tell of a broken group as long after. A busy machine may take longer than the first."""
FIRST, SECOND = Version(1, 1), Version(1, 2)


class Model(torch.nn.Module):
    """With a tied head and two types, so that buffers do not end where words do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 9)
        self.scale = torch.nn.Parameter(torch.randn(3).bfloat16())
        self.layers = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(4))
        self.head = torch.nn.Linear(9, 50, bias=False)
        self.head.weight = self.embedding.weight

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter))

    def sums(self) -> dict[str, float]:
        return {name: float(p.detach().double().sum()) for name, p in self.named_parameters()}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def pair() -> Iterator[list[StubEngine]]:
    with running_stubs(1, 1) as engines:
        yield engines


def opened(model: Model, *engines: StubEngine, **settings: float) -> EngineFleet:
    limits = {"weights_buffer_bytes": 700, "weights_retry_s": 1e-6}
    limits |= {"weights_look_s": 60, "weights_grace_s": 60}
    urls = tuple(engine.url for engine in engines)
    made = WeightsSettings.model_validate({"engines": urls, **limits, **settings})
    return EngineFleet(made, ModuleSource(model))


def check_serves(engine: StubEngine, model: Model, version: Version) -> None:
    assert engine.label() == str(version)
    assert not engine.paused()
    assert engine.weights() == [model.sums()] * engine.world_size


def reasons(report: SyncReport | None) -> dict[str, str]:
    assert report is not None
    return {failure.url: f"{failure.phase}: {failure.reason}" for failure in report.failures}


def test_every_engine_goes_through_the_phases_in_order(
    model: Model, pair: list[StubEngine]
) -> None:
    weights = opened(model, *pair)
    report = weights.sync(FIRST)
    assert report.engines == tuple(engine.url for engine in pair)
    assert report.is_complete and not report.failures
    for engine in pair:
        assert engine.seen() == ORDER
        check_serves(engine, model, FIRST)
    assert {*ORDER, "look", "confirm"} == {*report.seconds}


def test_the_group_is_kept_for_the_next_version(model: Model, pair: list[StubEngine]) -> None:
    weights = opened(model, *pair)
    weights.sync(FIRST)
    model.change()
    weights.sync(SECOND)
    for engine in pair:
        assert engine.seen() == ORDER + AGAIN
        check_serves(engine, model, SECOND)


def test_every_update_empties_the_caches_by_default(model: Model, pair: list[StubEngine]) -> None:
    weights = opened(model, *pair)
    for version in (FIRST, SECOND):
        weights.sync(version)
    assert [engine.cleared_caches() for engine in pair] == [[True, True]] * 2


def test_keys_and_values_are_kept_over_the_updates_of_one_incarnation(
    model: Model, pair: list[StubEngine]
) -> None:
    weights = opened(model, *pair, keep_kv=True)
    for version in (FIRST, SECOND):
        weights.sync(version)
    successor = opened(model, *pair, keep_kv=True)
    successor.sync(Version(2, 2))
    # The engines began with weights of no trainer, and a successor may have gone back.
    assert [engine.cleared_caches() for engine in pair] == [[True, False, True]] * 2


def test_bytes_are_those_of_the_parameters_and_tied_ones_count_once(
    model: Model, pair: list[StubEngine]
) -> None:
    report = opened(model, *pair).sync(FIRST)
    assert report.bytes == 50 * 9 * 4 + 3 * 2 + 4 * (81 + 9) * 4
    assert report.passes == 1
    assert "head.weight" not in pair[0].weights()[0]


def test_engines_of_several_workers_have_their_own_ranks(model: Model) -> None:
    with running_stubs(1, 2, 1) as engines:
        opened(model, *engines).sync(FIRST)
        for engine in engines:
            check_serves(engine, model, FIRST)


def test_weights_are_turned_into_another_type_on_their_way(
    model: Model, pair: list[StubEngine]
) -> None:
    settings = WeightsSettings(engines=(pair[0].url,))
    report = EngineFleet(settings, ModuleSource(model, torch.bfloat16)).sync(FIRST)
    assert report.bytes == 2 * (50 * 9 + 3 + 4 * 90)
    assert pair[0].weights() == [model.bfloat16().sums()]


PLACES = ["look", "pause", "join", "start", "update", "midway", "finish", "confirm", "resume"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["fail", "die"])
def test_an_engine_that_fails_costs_the_others_nothing(
    model: Model, pair: list[StubEngine], place: str, kind: str
) -> None:
    good, bad = pair
    bad.fault(place, kind)
    weights = opened(model, good, bad)
    report = weights.sync(FIRST)
    check_serves(good, model, FIRST)
    if kind == "fail" and place in ("join", "update", "midway"):
        # Nobody knows who broke the group, so each gets it alone; and then it works.
        assert report.engines and not report.failures
        check_serves(bad, model, FIRST)
        return
    assert report.engines == (good.url,) and report.is_complete
    assert reasons(report)[bad.url].startswith({"midway": "update"}.get(place, place))
    if kind == "die":
        bad.kill()
        bad.start()
    else:
        assert place in ("look", "pause") or bad.paused()
    calls = good.seen()
    healed = weights.catch_up()
    assert healed is None or not healed.failures
    assert good.seen() == calls
    check_serves(bad, model, FIRST)


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_that_hangs_is_given_up_at_the_deadline(model: Model, place: str) -> None:
    phase = {"midway": "update", "confirm": "look"}.get(place, place)
    for limit in LIMITS:
        with running_stubs(1, 1) as (good, bad):
            bad.fault(place, "hang")
            settings = {f"weights_{phase}_s": limit, "weights_grace_s": limit}
            started = time.monotonic()
            report = opened(model, good, bad, **settings).sync(FIRST)
            if not report.engines and limit < LIMITS[-1]:
                continue
            assert time.monotonic() - started < 10 * limit
            assert report.engines == (good.url,)
            assert "no response within" in reasons(report)[bad.url]
            check_serves(good, model, FIRST)
            return


def test_an_engine_that_always_fails_does_not_take_the_others_along(
    model: Model, pair: list[StubEngine]
) -> None:
    good, bad = pair
    weights = opened(model, good, bad)
    # In the group and alone.
    bad.fault("update", "fail")
    bad.fault("midway", "fail")
    report = weights.sync(FIRST)
    assert report.engines == (good.url,)
    assert "told to fail" in reasons(report)[bad.url]
    assert bad.paused() and bad.label() == "none"
    assert weights.catch_up() is not None
    check_serves(bad, model, FIRST)


def test_an_engine_killed_in_the_middle_of_a_broadcast_rejoins(
    model: Model, pair: list[StubEngine]
) -> None:
    good, bad = pair
    weights = opened(model, good, bad)
    weights.sync(FIRST)
    model.change()
    bad.fault("midway", "die")
    report = weights.sync(SECOND)
    assert report.engines == (good.url,) and report.passes == 2
    check_serves(good, model, SECOND)
    bad.kill()
    assert "look" in reasons(weights.catch_up())[bad.url]
    bad.start()
    healed = weights.catch_up()
    assert healed is not None and bad.url in healed.engines
    check_serves(bad, model, SECOND)
    model.change()
    assert len(weights.sync(Version(1, 3)).engines) == 2
    check_serves(good, model, Version(1, 3))
    check_serves(bad, model, Version(1, 3))


def test_an_engine_started_anew_between_two_versions_gets_a_new_group(
    model: Model, pair: list[StubEngine]
) -> None:
    weights = opened(model, *pair)
    weights.sync(FIRST)
    pair[1].kill()
    pair[1].start()
    assert len(weights.sync(SECOND).engines) == 2
    assert pair[0].seen() == ORDER * 2
    check_serves(pair[1], model, SECOND)


def test_an_update_that_another_trainer_left_is_ended_first(
    model: Model, pair: list[StubEngine]
) -> None:
    for engine in pair:
        engine.fault("midway", "fail")
    left = opened(model, *pair).sync(FIRST)
    assert not left.failures  # each had its second chance
    pair[0].fault("finish", "fail")
    assert opened(model, *pair).sync(SECOND).engines == (pair[1].url,)
    model.change()
    assert len(opened(model, *pair).sync(Version(2, 0)).engines) == 2
    check_serves(pair[0], model, Version(2, 0))


def test_tending_leaves_engines_that_are_well_alone(model: Model, pair: list[StubEngine]) -> None:
    weights = opened(model, *pair)
    assert weights.catch_up() is None  # there is no version yet
    weights.sync(FIRST)
    assert weights.catch_up() is None
    assert pair[0].seen() == ORDER


def test_an_engine_that_failed_is_tried_again_only_after_a_while(
    model: Model, pair: list[StubEngine]
) -> None:
    pair[0].kill()
    weights = opened(model, *pair, weights_retry_s=1000)
    assert weights.sync(FIRST).engines == (pair[1].url,)
    pair[0].start()
    assert weights.catch_up() is None
    assert pair[0].seen() == []
    assert len(weights.sync(SECOND).engines) == 2


def test_no_engine_at_all_and_no_engine_reachable_are_told(model: Model) -> None:
    none = opened(model).sync(FIRST)
    assert not none.is_complete and not none.failures
    with running_stubs(1) as (engine,):
        engine.kill()
        report = opened(model, engine).sync(FIRST)
    assert not report.is_complete
    assert "refused" in reasons(report)[engine.url]
    assert "failed in phase look" in str(report)


def test_versions_of_an_engine_never_decrease(model: Model, pair: list[StubEngine]) -> None:
    weights = opened(model, *pair)
    weights.sync(SECOND)
    with pytest.raises(ValueError, match="never decrease"):
        weights.sync(FIRST)
    older = opened(model, *pair)
    report = older.sync(FIRST)
    assert not report.is_complete
    assert "another trainer has taken over" in reasons(report)[pair[0].url]
    assert pair[0].label() == str(SECOND) and not pair[0].paused()
    weights.sync(Version(2, 0))
    check_serves(pair[0], model, Version(2, 0))


def test_the_same_version_is_sent_once(model: Model, pair: list[StubEngine]) -> None:
    weights = opened(model, *pair)
    weights.sync(FIRST)
    again = weights.sync(FIRST)
    assert len(again.engines) == 2 and not again.passes
    assert pair[0].seen() == ORDER


def test_a_source_that_fails_is_our_own_error(model: Model, pair: list[StubEngine]) -> None:
    class Broken(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(super().__iter__())[:3]
            raise KeyError("no such tensor")

    urls = tuple(engine.url for engine in pair)
    weights = EngineFleet(WeightsSettings(engines=urls, weights_buffer_bytes=100), Broken(model))
    with pytest.raises(KeyError):
        weights.sync(FIRST)
    assert pair[0].paused() and pair[0].label() == "default"
    assert len(opened(model, *pair).sync(FIRST).engines) == 2
    check_serves(pair[0], model, FIRST)


def test_engines_come_from_a_file_that_may_change(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    engines = EngineList(["http://a:1/"], file)
    assert engines.urls() == ["http://a:1"]
    file.write_text("# ours\nhttp://b:1\n\n http://c:1/\nhttp://b:1\n")
    assert engines.urls() == ["http://b:1", "http://c:1"]
    file.unlink()
    assert engines.urls() == ["http://b:1", "http://c:1"]
    file.write_text("")
    assert engines.urls() == []


def test_a_new_engine_in_the_file_is_brought_up_to_date(
    model: Model, pair: list[StubEngine], tmp_path: Path
) -> None:
    file = tmp_path / "engines"
    file.write_text(pair[0].url)
    weights = EngineFleet(WeightsSettings(engines_file=file), ModuleSource(model))
    weights.sync(FIRST)
    file.write_text(f"{pair[0].url}\n{pair[1].url}\n")
    assert weights.catch_up() is not None
    check_serves(pair[1], model, FIRST)
    assert pair[0].seen() == ORDER
