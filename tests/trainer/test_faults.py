"""Trainers that are stopped, doubled, starved or robbed of their log."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from pool import topics
from pool.connection import Connection
from pool.consumers.membership import count_members
from pool.core.ledger import Ledger
from pool.topics import LEDGER, POLICY, REWARDED
from schemas import PolicyVersion
from tests.pool.log import committed, records
from tests.trainer.agents import RUN, submit_groups
from tests.trainer.decisions.live_run import decisions, trained
from tests.trainer.trainer_process import TrainerProcess, settings_of

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PATIENCE = 90.0


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=2)
    return connection


@contextmanager
def running_trainer(
    settings: dict[str, Any], die: tuple[str, int] | None = None
) -> Iterator[TrainerProcess]:
    trainer = TrainerProcess(settings, die)
    try:
        yield trainer
    finally:
        trainer.end()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.2)


def versions(log: Connection, phase: str) -> list[tuple[int, int]]:
    policy = (r for r in committed(log, POLICY) if isinstance(r, PolicyVersion))
    return [(r.incarnation, r.version) for r in policy if r.phase == phase]


def test_f8_of_two_trainers_one_works_and_the_other_waits_as_a_spare(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(log, tiny_model, tmp_path)
    with running_trainer(settings) as first:
        until(lambda: (1, 0) in versions(log, "live"))
        until(lambda: count_members(log, f"steplog-trainer-{RUN}") == 1)
        with running_trainer(settings) as spare:
            submit_groups(log, ["a", "b"])
            until(lambda: (1, 1) in versions(log, "live"))
            first.process.kill()
            until(lambda: (2, 1) in versions(log, "live"))
            submit_groups(log, ["c", "d"], version=1, incarnation=2)
            until(lambda: (2, 2) in versions(log, "live"))
            spare.signal(signal.SIGTERM)
            assert spare.wait() == 0
    assert versions(log, "started") == [(1, 0), (2, 1)]
    Ledger(RUN, records(log, LEDGER))


def test_f8_a_trainer_that_stood_still_while_another_took_over_ends_itself(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(log, tiny_model, tmp_path)
    with running_trainer(settings) as old:
        until(lambda: (1, 0) in versions(log, "live"))
        old.signal(signal.SIGSTOP)
        with running_trainer(settings) as new:
            until(lambda: (2, 0) in versions(log, "live"))
            submit_groups(log, ["a", "b"])
            until(lambda: (2, 1) in versions(log, "live"))
            old.signal(signal.SIGCONT)
            assert old.wait() == 1
            submit_groups(log, ["c", "d"], version=1, incarnation=2)
            until(lambda: (2, 2) in versions(log, "live"))
            new.signal(signal.SIGTERM)
            assert new.wait() == 0
    assert {d.incarnation for d in decisions(log) if d.version is not None} == {2}
    Ledger(RUN, records(log, LEDGER))


def test_f13_decided_records_that_the_log_deleted_stop_the_trainer_until_it_may_go_on(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    submit_groups(log, [f"p{n}" for n in range(4)])
    settings = settings_of(log, tiny_model, tmp_path, versions=2)
    assert TrainerProcess(settings, ("trained", 2)).wait() == -9
    delete_all(log, REWARDED)
    assert TrainerProcess(settings).wait() == 1, "it must not go on as if nothing were missing"
    assert len([d for d in decisions(log) if d.version is not None]) == 2

    assert TrainerProcess(settings | {"accept_loss": True}).wait() == 0
    lost = [g for d in decisions(log) for g in d.groups if g.verdict == "lost"]
    assert len(lost) == 4
    assert versions(log, "live")[-1][1] == 2


def test_f20_a_trainer_that_was_away_skips_what_is_too_old_and_trains_on(
    log: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(log, tiny_model, tmp_path, max_age=1)
    with running_trainer(settings) as trainer:
        until(lambda: (1, 0) in versions(log, "live"))
        submit_groups(log, ["a", "b"])
        until(lambda: (1, 1) in versions(log, "live"))
        trainer.process.kill()
    submit_groups(log, [f"missed{n}" for n in range(400)], version=0)
    with running_trainer(settings):
        for version in (1, 2, 3):
            until(lambda version=version: (2, version) in versions(log, "live"))  # type: ignore[misc]
            submit_groups(log, [f"fresh{version}{n}" for n in "ab"], version=version, incarnation=2)
        until(lambda: {"fresh3a", "fresh3b"} <= trained_after(log, 2))
    assert not [name for name in trained_after(log, 2) if name.startswith("missed")]


def trained_after(log: Connection, version: int) -> set[str]:
    later = [decision for decision in decisions(log) if (decision.version or 0) > version]
    return {name for decision in later for name in trained(decision)}


def delete_all(log: Connection, topic: str) -> None:
    """As retention would."""
    admin = AdminClient(log.confluent())
    places = [TopicPartition(log.topic_name(topic), number, -1) for number in range(2)]
    for future in admin.delete_records(places).values():
        future.result(10)
