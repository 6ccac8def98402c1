"""Several trainers on one log, each in its own group, and a reader beside them."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from pool import topics
from pool.connection import Connection
from pool.consumers.transaction import read_offsets
from pool.core.ledger import Ledger
from pool.readers.dataset import Dataset
from pool.readers.selection import SelectionSettings
from pool.topics import LEDGER, REWARDED
from schemas import Outcome
from tests.pool.log import records
from tests.trainer.agents import RUN, submit_groups
from tests.trainer.decisions.live_run import decisions, trained
from tests.trainer.offline.history import offline
from tests.trainer.trainer_process import TrainerProcess, settings_of

pytestmark = [pytest.mark.broker, pytest.mark.slow]

FIRST, SECOND = [f"a{n}" for n in range(4)], [f"b{n}" for n in range(4)]
CLASSIC = {"loss": "ppo_clip", "advantage": "group_std", "aggregation": "seq_mean_token_mean"}


def trained_by(connection: Connection, run: str) -> list[str]:
    made = [decision for decision in decisions(connection) if decision.run == run]
    return [prompt for decision in made for prompt in trained(decision)]


def versions(connection: Connection, run: str) -> int:
    told = [r for r in records(connection, LEDGER) if isinstance(r, Outcome) and r.run == run]
    return max((outcome.version for outcome in told), default=0)


def until(is_so: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.2)


def offsets(connection: Connection, group: str) -> list[int]:
    reader = Consumer(connection.confluent(group_id=group))
    asked = [TopicPartition(connection.topic_name(REWARDED), number) for number in range(2)]
    found = [place.offset for place in read_offsets(reader, asked, 30)]
    reader.close()
    return found


@pytest.mark.timeout(900)
def test_each_reader_has_all_of_the_log_and_none_waits_for_another(
    connection: Connection, tiny_model: Path, tmp_path: Path
) -> None:
    topics.create(connection, partitions=2)
    # The data are of one version, and age is not what this is about.
    fields: dict[str, Any] = {"max_age": 1000}
    one = settings_of(connection, tiny_model, tmp_path, **fields)
    other = settings_of(
        connection, tiny_model, tmp_path, run="other", accept_runs=(RUN,), **CLASSIC, **fields
    )
    submit_groups(connection, FIRST)
    trainers = [TrainerProcess(one), TrainerProcess(other)]
    try:
        until(lambda: all(versions(connection, run) == 2 for run in (RUN, "other")))
        trainers[0].signal(signal.SIGSTOP)
        before = offsets(connection, f"steplog-trainer-{RUN}")
        submit_groups(connection, SECOND)
        until(lambda: versions(connection, "other") == 4)
        assert TrainerProcess(offline(connection, tiny_model, tmp_path, loss="cispo")).wait() == 0
        with Dataset(connection, REWARDED, SelectionSettings()) as dataset:
            assert len(list(dataset)) == 32
        assert offsets(connection, f"steplog-trainer-{RUN}") == before
        assert sum(offsets(connection, "steplog-trainer-other")) > sum(before)
        assert versions(connection, RUN) == 2, "it stands still"
        trainers[0].end()
        trainers.append(TrainerProcess(one))
        until(lambda: versions(connection, RUN) == 4)
    finally:
        for trainer in trainers:
            trainer.end()
    for run in (RUN, "other", "again"):
        assert sorted(trained_by(connection, run)) == FIRST + SECOND
        Ledger(run, records(connection, LEDGER))  # raises if a group was trained twice
