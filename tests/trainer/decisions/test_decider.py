"""Decisions, on a real broker, by a decider that nobody trains for."""

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition

from pool import topics
from pool.connection import Connection
from pool.consumers.transaction import read_offsets
from pool.core.groups import GroupRules
from pool.core.marks import PolicyMarks
from pool.topics import LEDGER, POLICY, REWARDED
from schemas import Feedback, PolicyVersion, Record, TrajectoryEnd
from servicekit.errors import Fenced
from tests.pool.log import records
from tests.trainer.agents import RUN, group, submit, submit_groups
from tests.trainer.decisions.live_run import (
    GROUP,
    PATIENCE,
    decisions,
    running_decider,
    trained,
    verdicts,
)
from trainer.incarnation.live import LiveIncarnation

pytestmark = pytest.mark.broker


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=2)
    return connection


def until(is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def test_a_decision_and_its_offsets_are_one_transaction(log: Connection) -> None:
    submit_groups(log, ["a", "b", "c"])
    with running_decider(log) as run:
        run.open(0)
        decision = run.next_batch(1)
        reader = Consumer(log.confluent(group_id=GROUP))
        asked = [TopicPartition(log.topic_name("rewarded"), p) for p in range(2)]
        committed = {at.partition: at.offset for at in read_offsets(reader, asked, PATIENCE)}
        reader.close()
    assert len(trained(decision)) == 2
    assert decisions(log)[0] == decision
    assert all(committed[at.partition] >= at.committed for at in decision.offsets)


def test_what_a_life_left_undecided_the_next_one_decides(log: Connection) -> None:
    submit_groups(log, [f"p{n}" for n in range(5)])
    with running_decider(log) as run:
        run.open(0)
        first = run.next_batch(1)
    with running_decider(log) as run:
        assert run.incarnation.number == 2
        second = run.next_batch(2)
        submit_groups(log, ["new"])
        third = run.next_batch(3)
    seen = trained(first) + trained(second) + trained(third)
    assert sorted(seen) == ["new", "p0", "p1", "p2", "p3", "p4"]


def test_a_batch_keeps_places_for_an_environment_with_a_minimum_share(log: Connection) -> None:
    share = '{"environment": "code", "steplog_share": {"minimum": 0.5}}'
    submit_groups(log, ["a", "b", "c"])
    submit_groups(log, ["x"], metadata=share)
    with running_decider(log) as run:
        run.open(0)
        until(lambda: run.decider.ready() == 4)
        first = trained(run.next_batch(1))
        assert len(first) == 2 and "x" in first
        second = run.decider.next_batch(2)
        submit_groups(log, ["d"])
        until(lambda: run.decider.ready() == 3)
        assert not second.done(), "it waits for the other environment"
        submit_groups(log, ["y"], metadata=share)
        assert "y" in trained(second.result(PATIENCE))
    with running_decider(log, min_share_wait_s=0) as run:
        assert len(trained(run.next_batch(3))) == 2, "one that delivers nothing is not waited for"


def test_groups_without_variance_give_way_to_others(log: Connection) -> None:
    submit_groups(log, ["flat1", "flat2"], rewards=[1, 1, 1, 1])
    submit_groups(log, ["a", "b"])
    with running_decider(log) as run:
        run.open(0)
        assert sorted(trained(run.next_batch(1))) == ["a", "b"]
    found = verdicts(log)
    assert {found[f"flat1-{n}"] for n in range(4)} == {"no_variance"}


def test_shrinking_trains_what_has_variance_among_those_looked_at(log: Connection) -> None:
    submit(log, [*group("flat", rewards=[0, 0, 0, 0]), *group("a")])
    with running_decider(log, no_variance="shrink") as run:
        run.open(0)
        assert trained(run.next_batch(1)) == ["a"]
    assert verdicts(log)["flat-0"] == "no_variance"


def test_i8_a_record_older_than_allowed_is_refused_by_its_offset_alone(log: Connection) -> None:
    """Both groups claim the newest version they can; only where they lie tells them apart."""
    with running_decider(log, max_age=2, groups_per_batch=1) as run:
        run.open(0)
        submit_groups(log, ["old"], version=0)
        until(lambda: run.decider.ready() == 1)  # or else it would be skipped without being read
        for version in (1, 2, 3):
            run.open(version)
        submit_groups(log, ["fresh"], version=3)
        assert trained(run.next_batch(4)) == ["fresh"]
        until(lambda: "old-0" in verdicts(log))
    assert {verdicts(log)[f"old-{n}"] for n in range(4)} == {"stale"}
    marks = PolicyMarks(RUN, (r for r in records(log, POLICY) if isinstance(r, PolicyVersion)))
    batch = next(d for d in decisions(log) if d.version == 4)
    for decided in (g for g in batch.groups if g.verdict == "train"):
        assert decided.first_offset >= marks._steps[1][decided.partition]


def test_what_became_too_old_while_it_waited_keeps_no_place(log: Connection) -> None:
    """Whoever waits for the next batch may wait long, and a place in the pipeline with it."""
    with running_decider(log, max_age=0) as run:
        run.open(0)
        submit(log, group("a") + group("b"))
        run.next_batch(1)
        run.open(1)
        submit(log, group("c", version=1) + group("d", version=1) + group("old", version=0))
        until(lambda: run.decider.ready() == 3)
        decision = run.next_batch(2)
        assert sorted(trained(decision)) == ["c", "d"]
        assert run.decider.ready() == 0
    assert {verdicts(log)[f"old-{n}"] for n in range(4)} == {"stale"}


def test_a_batch_decided_ahead_has_the_ages_of_the_version_that_it_starts_from(
    log: Connection,
) -> None:
    """Version 1 is still in training, and what version 0 sampled will be one version old then."""
    with running_decider(log, max_age=0, groups_per_batch=1) as run:
        run.open(0)
        submit_groups(log, ["a"], version=0)
        first = run.next_batch(1)
        ahead = run.decider.next_batch(2)
        submit_groups(log, ["b"], version=0)
        until(lambda: "b-0" in verdicts(log))
        run.open(1)
        submit_groups(log, ["c"], version=1)
        assert trained(ahead.result(PATIENCE)) == ["c"]
        statistics = [
            run.decider.take_statistics(sequence)
            for sequence in (first.sequence, ahead.result().sequence)
        ]
    assert {verdicts(log)[f"b-{n}"] for n in range(4)} == {"stale"}
    assert [[age.total for age in each.ages] for each in statistics] == [[0] * 4, [0] * 4]


def test_a_record_that_claims_a_version_before_it_was_open_is_invalid(log: Connection) -> None:
    with running_decider(log, groups_per_batch=1) as run:
        run.open(0)
        run.open(1)
        submit_groups(log, ["liar"], version=7)
        submit_groups(log, ["honest"], version=1)
        assert trained(run.next_batch(2)) == ["honest"]
        until(lambda: "liar-0" in verdicts(log))
    assert verdicts(log)["liar-0"] == "invalid"


@pytest.mark.slow
def test_what_is_too_old_for_certain_is_skipped_without_being_read(log: Connection) -> None:
    with running_decider(log, groups_per_batch=1, max_age=1) as run:
        run.open(0)
        submit_groups(log, ["first"], version=0)
        assert trained(run.next_batch(1)) == ["first"]
    # A long outage: agents go on, and versions pass.
    missed = [f"missed{n}" for n in range(200)]
    submit_groups(log, missed, version=0)
    without_reading = LiveIncarnation(
        log, RUN, GROUP, REWARDED, GroupRules(), 100, lambda stage: None
    )
    for version in (1, 2, 3, 4):
        without_reading.open_version(version)
    without_reading.consumer.close()
    submit_groups(log, ["fresh"], version=4)
    # However late it is asked for a batch, most of the range is still to be read then.
    with running_decider(log, groups_per_batch=1, max_age=1, max_waiting=10) as run:
        assert trained(run.next_batch(5)) == ["fresh"]
    skipped = [at for decision in decisions(log) for at in decision.skipped]
    assert sum(at.end - at.first for at in skipped) > 200
    named = verdicts(log)
    assert {named[f"{name}-0"] for name in missed if f"{name}-0" in named} <= {"stale"}
    # Another incarnation, which rebuilds from the same offsets, sees nothing of the range.
    with running_decider(log, groups_per_batch=1, max_age=1) as run:
        submit_groups(log, ["later"], version=4)
        assert trained(run.next_batch(6)) == ["later"]
    assert len(verdicts(log)) == len(named) + 4


def test_a_group_at_its_deadline_is_decided_with_the_members_it_has(log: Connection) -> None:
    *others, last_step, last_end = group("slow", size=4)
    submit(log, [last_step, *others])
    with running_decider(log, groups_per_batch=1, group_deadline_s=0.1) as run:
        run.open(0)
        decision = run.next_batch(1)
        assert trained(decision) == ["slow"]
        submit(log, [last_end])
        until(lambda: "slow-3" in verdicts(log))
    assert verdicts(log)["slow-3"] == "late"


def test_feedback_counts_until_its_group_is_decided(log: Connection) -> None:
    submit_groups(log, ["flat"], rewards=[0, 0, 0, 0])
    late = Feedback(
        feedback_id="f", trajectory_uid="flat-0", prompt_uid="flat", run=RUN, reward=1.0
    )
    submit(log, [late])
    with running_decider(log, groups_per_batch=1) as run:
        run.open(0)
        assert trained(run.next_batch(1)) == ["flat"]


def test_groups_of_one_prompt_are_decided_in_the_order_in_which_they_closed(
    log: Connection,
) -> None:
    """The second could be refused at once, but the first still waits for a batch."""
    submit_groups(log, ["p"])
    submit(log, [renamed(r, "-again") for r in group("p", seed=1, rewards=[0, 0, 0, 0])])
    with running_decider(log, groups_per_batch=2) as run:
        run.open(0)
        wanted = run.decider.next_batch(1)
        until(lambda: run.decider.ready() == 1)
        submit_groups(log, ["q"])
        assert sorted(trained(wanted.result(PATIENCE))) == ["p", "q"]
        until(lambda: "p-0-again" in verdicts(log))
    assert verdicts(log)["p-0-again"] == "no_variance"


def test_i11_every_trajectory_has_one_verdict(log: Connection) -> None:
    submit_groups(log, ["a", "b", "c", "d"])
    submit_groups(log, ["flat"], rewards=[1, 1, 1, 1])
    failed = [
        msgspec.structs.replace(r, status="failed", reward=None)
        if isinstance(r, TrajectoryEnd)
        else r
        for r in group("failed")
    ]
    submit(log, failed)
    with running_decider(log) as run:
        run.open(0)
        run.next_batch(1)
        run.next_batch(2)
        until(lambda: len(verdicts(log)) == 24)
    counts = run.incarnation.ledger.verdicts
    assert (counts["train"], counts["no_variance"], counts["invalid"]) == (16, 4, 4)


@pytest.mark.slow
def test_a_trainer_that_was_replaced_can_decide_nothing_more(log: Connection) -> None:
    submit_groups(log, ["a", "b"])
    with running_decider(log) as old:
        old.open(0)
        with running_decider(log) as new:
            assert new.incarnation.number == old.incarnation.number + 1
            with pytest.raises(Fenced):
                old.open(1)
    assert records(log, LEDGER) == decisions(log)


RecordT = TypeVar("RecordT", bound=Record)


def renamed(record: RecordT, suffix: str) -> RecordT:
    """The same of another trajectory."""
    names = ("trajectory_uid", "step_id", "end_id")
    fields = {name: getattr(record, name) + suffix for name in names if hasattr(record, name)}
    return msgspec.structs.replace(record, **fields)
