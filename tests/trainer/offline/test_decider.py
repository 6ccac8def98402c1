"""What an offline run decides depends on the log alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as ConfluentProducer
from tokenizers import Tokenizer

from pool import topics
from pool.connection import Connection
from pool.producers.output import producer_options
from pool.topics import REWARDED
from schemas import Decision
from servicekit.errors import Fatal
from servicekit.tokenizer import TokenizerFolder, fingerprint
from tests.trainer.agents import RUN, group, submit, submit_groups
from tests.trainer.decisions.live_run import PATIENCE, decisions, trained
from tests.trainer.offline.history import AGAIN, offline, write_history
from trainer.algorithm.settings import LossSettings
from trainer.decisions.decider import RangeEnded
from trainer.decisions.judge import Judge
from trainer.decisions.maker import DecisionMaker
from trainer.offline import decider as deciding
from trainer.offline.decider import OfflineDecider
from trainer.offline.incarnation import OfflineIncarnation, lock_run
from trainer.offline.run_definition import define_run
from trainer.settings import TrainSettings

pytestmark = pytest.mark.broker

NO_MODEL = Path("no-model")


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=3)
    return connection


def settings_for(log: Connection, **fields: Any) -> TrainSettings:
    given = offline(log, NO_MODEL, NO_MODEL) | fields
    return TrainSettings.model_validate(given)


def batches(settings: TrainSettings) -> Iterator[Decision]:
    """One life of a run that nobody trains; it dies when nobody wants more of it."""
    known = TokenizerFolder(str(settings.model))
    life = OfflineIncarnation(settings, define_run(settings, known), known, lambda stage: None)
    judge = Judge(settings, life.marks, LossSettings(), any_age=True)
    decider = OfflineDecider(life, DecisionMaker(life, settings, judge, lambda n: {"seed": n}))
    decider.start()
    version = max((d.version or 0 for d in life.ledger.trained_after(0)), default=0)
    try:
        while True:
            version += 1
            yield decider.next_batch(version).result(PATIENCE)
    except RangeEnded:
        pass
    finally:
        decider.close()


def told(log: Connection, run: str) -> list[tuple[Any, ...]]:
    """What a run has decided, without what may differ from life to life."""
    return [
        (d.sequence, d.version, d.groups, d.others, d.offsets, d.seed)
        for d in decisions(log)
        if d.run == run
    ]


def test_a_run_that_dies_after_every_batch_decides_as_one_that_lives(
    log: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        deciding, "MAX_VERDICTS", 6
    )  # so that there are Decisions without a batch, too
    write_history(log, 25)
    undisturbed = batches(settings_for(log, run="whole", groups_per_batch=4))
    torn = settings_for(log, run="torn", groups_per_batch=4)
    made = [next(undisturbed)]
    next(batches(torn))
    submit_groups(log, ["later"])  # both have begun, so it is in the range of neither
    made += undisturbed
    while next(batches(torn), None):
        pass
    ours, theirs = told(log, "whole"), told(log, "torn")
    assert ours == theirs
    assert len(ours) > len(made) + 1, "some Decisions have no batch"
    assert "later" not in {prompt for decision in made for prompt in trained(decision)}


def test_every_trajectory_of_the_range_is_decided_once_and_the_last_batch_is_what_is_left(
    log: Connection,
) -> None:
    write_history(log, 20)
    made = list(batches(settings_for(log, groups_per_batch=4, quorum=0.75)))
    decided = [g for d in decisions(log) for g in d.groups]
    assert sorted(g.prompt_uid for g in decided) == sorted(f"p{n}" for n in range(20))
    flat = {f"p{n}" for n in range(3, 20, 4)}
    assert {g.prompt_uid for g in decided if g.verdict == "no_variance"} == flat
    assert [len(trained(d)) for d in made] == [4, 4, 4, 3]
    incomplete = {"p5", "p12"}  # p19 is flat
    assert incomplete <= {*trained(made[-2]), *trained(made[-1])}, "three of four are enough"
    assert not list(batches(settings_for(log, groups_per_batch=4, quorum=0.75)))
    assert len(told(log, AGAIN)) == len(decisions(log))


def test_a_group_too_small_when_the_range_ends_is_not_trained(log: Connection) -> None:
    submit(log, group("a") + group("b")[:6])
    (made,) = batches(settings_for(log, quorum=1.0))
    assert trained(made) == ["a"]
    (small,) = (g for d in decisions(log) for g in d.groups if g.verdict == "too_few")
    assert (small.prompt_uid, len(small.members)) == ("b", 3)


def test_only_what_is_selected_is_read(log: Connection) -> None:
    submit_groups(log, ["a", "b"], version=0)
    wanted = settings_for(log, of_run=(RUN,), where=("kind=x",))
    with pytest.raises(Fatal, match=r"no trajectory of channel train in the range matches"):
        next(batches(wanted))
    with pytest.raises(Fatal, match=r"Version 3 of run run does not exist; it has none"):
        next(batches(settings_for(log, of_run=(RUN,), from_version=3)))
    with pytest.raises(Fatal, match=r"The range selects nothing of .*rewarded"):
        next(batches(settings_for(log, from_=10_000)))
    with pytest.raises(Fatal, match=r"no trajectory of channel val in the range matches"):
        next(batches(settings_for(log, channel="val")))
    assert decisions(log) == [], "nothing was written"
    (made,) = batches(settings_for(log, of_run=(RUN,)))
    assert sorted(trained(made)) == ["a", "b"]


def test_a_run_goes_on_as_it_began_or_not_at_all(log: Connection, tmp_path: Path) -> None:
    submit_groups(log, ["a", "b", "c"])
    next(batches(settings_for(log)))
    for changed, words in (
        ({"until": 4}, r"run again was started with until=nothing, and now it is 4"),
        (
            {"of_run": ("run",)},
            r"started with of_run=nothing, and now it is run; use the original value",
        ),
        ({"groups_per_batch": 3}, r"started with groups_per_batch=2, and now it is 3"),
        ({"loss": "cispo"}, r"started with loss=dppo_tv, and now it is cispo"),
        ({"seed": 7}, r"started with seed=0, and now it is 7"),
    ):
        with pytest.raises(Fatal, match=words):
            next(batches(settings_for(log, **changed)))
    with (
        lock_run(tmp_path, AGAIN),
        pytest.raises(Fatal, match=r"run again is being trained by another process"),
        lock_run(tmp_path, AGAIN),
    ):
        pass


def test_ids_of_another_tokenizer_are_refused(log: Connection, tiny_model: Path) -> None:
    known = fingerprint(Tokenizer.from_file(str(tiny_model / "tokenizer.json")))
    submit_groups(log, ["unknown"])
    submit(log, group("known", tokenizer=known))
    fields = {"model": tiny_model}
    assert len(list(batches(settings_for(log, run="fits", **fields)))) == 1
    submit(log, group("other", tokenizer="abc"))
    with pytest.raises(Fatal, match=r"is \w+, and the Steps were recorded with abc"):
        list(batches(settings_for(log, run="differs", **fields)))
    assert not [d for d in decisions(log) if d.run == "differs"], "nothing was written"


def test_a_schema_from_the_future_is_one_sentence(log: Connection) -> None:
    submit_groups(log, ["a"])
    producer = ConfluentProducer(producer_options(log))
    producer.produce(log.topic_name(REWARDED), b"\xc3\x01newer!!!", key="a")
    producer.flush(30)
    words = r"Offset 8 of partition . of .*rewarded cannot be read: .* no schema with fingerprint"
    with pytest.raises(Fatal, match=words):
        list(batches(settings_for(log)))
    with pytest.raises(Fatal, match=words):
        list(batches(settings_for(log, run="other", from_=8)))
    assert not [d for d in decisions(log) if d.run == "other"], "nothing was written"
