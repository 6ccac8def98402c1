"""What is deleted is nowhere in the copy, and everything else is where it was."""

import os
import signal
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import Producer as ConfluentProducer

from pool import topics
from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.core.bookmark import Bookmark
from pool.core.trajectories import StrayRecord, Trajectory, TrajectoryAssembler
from pool.producers.output import producer_options
from pool.readers.dataset import Dataset
from pool.readers.end_offsets import wait_until_readable
from pool.readers.selection import SelectionSettings
from pool.topics import DEAD_LETTERS, LEDGER, REWARDED, STEPS, TRAJECTORIES
from replay.deletion.command import delete
from replay.settings import DeleteSettings
from schemas import (
    Codec,
    DecidedGroup,
    Decision,
    Member,
    Outcome,
    Position,
    Record,
    Registration,
)
from servicekit.errors import Fatal
from steplog.kafka import local_kafka
from tests import processes
from tests.pool.log import messages, records, until, write
from tests.pool.records import end, run_of, step

pytestmark = [pytest.mark.broker, pytest.mark.slow]

GROUP = "readers"


class Log:
    """A log with one trajectory that must go, of a tenant, among others."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.uid = uuid.uuid4().hex
        self.group = f"{GROUP}-{connection.topic_prefix}"
        topics.create(connection, partitions=2)
        topics.create_rewarded_topic(connection, "second")
        gone = [
            step(f"{self.uid}-0", self.uid, "acme/p", tenant="acme"),
            end(self.uid, "acme/p", metadata=f'{{"who": "{self.uid}"}}'),
        ]
        for topic in (STEPS, REWARDED, "rewarded.second"):
            write(connection, topic, run_of("before", "acme/p") + tuple(gone[:1]))
            self.transaction(topic, gone[1:], abort=True)
            self.transaction(topic, [*gone[1:], *run_of("after", "q")])
        register = [self.registration(self.uid, "acme"), self.registration("after", "")]
        self.transaction(TRAJECTORIES, register)
        write(connection, LEDGER, [decision(self.uid), Outcome(**LIFE, version=1)])
        letter = [("steplog.reason", f"step of {self.uid} is odd".encode())]
        self.produce(DEAD_LETTERS, b"acme/p", b"\x00odd", letter)
        self.produce(DEAD_LETTERS, b"q", b"\x00odd too", [])

    def registration(self, uid: str, tenant: str) -> Registration:
        begins = Position(partition=0, offset=0)
        return Registration(
            trajectory_uid=uid, prompt_uid="p", run="run", tenant=tenant, begins=begins
        )

    def transaction(self, topic: str, records: Iterable[Record], abort: bool = False) -> None:
        """Leaves a gap in the offsets."""
        name = self.connection.topic_name(topic)
        producer = ConfluentProducer(producer_options(self.connection, transactional_id=name))
        producer.init_transactions(30)
        producer.begin_transaction()
        for record in records:
            key = record.trajectory_uid if topic == TRAJECTORIES else record.prompt_uid  # type: ignore[attr-defined]
            producer.produce(name, Codec().encode(record), key)
        producer.flush(30)
        (producer.abort_transaction if abort else producer.commit_transaction)(30)
        wait_until_readable(self.connection, topic)

    def produce(self, topic: str, key: bytes, value: bytes, headers: list[Any]) -> None:
        producer = ConfluentProducer(producer_options(self.connection))
        producer.produce(self.connection.topic_name(topic), value, key, headers=headers)
        assert producer.flush(30) == 0

    def commit(self) -> list[TopicPartition]:
        """A group's offsets, the End of each partition's last trajectory pending."""
        name = self.connection.topic_name(STEPS)
        ends = {m.partition: m.offset + 1 for m in messages(self.connection, STEPS)}
        places = [
            TopicPartition(name, number, end, Bookmark(0, (end - 1,)).encode())
            for number, end in ends.items()
        ]
        consumer = Consumer(self.connection.confluent(group_id=self.group))
        consumer.commit(offsets=places, asynchronous=False)
        consumer.close()
        return places

    def delete(self, **settings: Any) -> list[str]:
        given = {"into_prefix": f"copy-{self.connection.topic_prefix}", **settings}
        told: list[str] = []
        delete(DeleteSettings(**{**self.connection.model_dump(), **given}), told.append)
        return told

    @property
    def copy(self) -> Connection:
        prefix = f"copy-{self.connection.topic_prefix}"
        return self.connection.model_copy(update={"topic_prefix": prefix})


LIFE: Any = {"run": "run", "incarnation": 1, "sequence": 0}


def decision(uid: str) -> Decision:
    members = [
        Member(trajectory_uid=uid, verdict="train", offsets=[2, 5]),
        Member(trajectory_uid="before", verdict="train", offsets=[0, 1]),
    ]
    group = DecidedGroup(
        prompt_uid="acme/p", partition=0, first_offset=0, closed_at=6, verdict="train",
        members=members,
    )  # fmt: skip
    return Decision(**LIFE, version=1, groups=[group], others=members[:1])


@pytest.fixture
def log(connection: Connection) -> Log:
    return Log(connection)


def everything(connection: Connection) -> dict[tuple[str, int, int], Any]:
    """Every record with all that a reader sees of it, by its place."""
    return {
        (name, m.partition, m.offset): (m.key, m.value, m.headers, m.timestamp)
        for name in topics.find_topics(connection)
        for m in messages(connection, name)
    }


def test_a_deleted_trajectory_is_nowhere_and_the_rest_is_where_it_was(log: Log) -> None:
    committed = log.commit()
    told = log.delete(trajectory=(log.uid,))
    before, after = everything(log.connection), everything(log.copy)
    assert not [place for place, found in after.items() if log.uid.encode() in repr(found).encode()]
    left_out = {
        place for place, found in before.items() if log.uid.encode() in repr(found).encode()
    }
    kept = {place: found for place, found in before.items() if place not in left_out}
    assert len(left_out) == 3 * 2 + 1 + 1 + 1
    assert {place: after[place] for place in kept} == kept
    assert not [place for place in after.keys() - before.keys() if after[place][1] is not None]

    [scrubbed, _] = records(log.copy, LEDGER)
    assert isinstance(scrubbed, Decision)
    assert [m.trajectory_uid for m in scrubbed.groups[0].members] == ["deleted", "before"]
    assert [m.offsets for m in scrubbed.groups[0].members] == [[2, 5], [0, 1]]
    assert any("Verified: none of the" in line for line in told)

    reader = Consumer(log.copy.confluent(group_id=log.group))
    asked = [TopicPartition(log.copy.topic_name(STEPS), at.partition) for at in committed]
    found = reader.committed(asked, timeout=30)
    reader.close()
    assert [(at.offset, at.metadata) for at in found] == [
        (at.offset, at.metadata) for at in committed
    ]


def test_consumers_go_on_with_the_copy(log: Log) -> None:
    """Tombstones are no poison, and work that was pending may have gone."""
    log.commit()
    log.delete(tenant="acme")
    consumer: StatefulConsumer[Trajectory | StrayRecord] = StatefulConsumer(
        log.copy,
        topic=STEPS,
        group=log.group,
        transactional_id=log.group,
        assembler=lambda partition: TrajectoryAssembler(),
        codec=Codec(),
    )
    with consumer:
        seen: list[str] = []

        def turn() -> None:
            for work in consumer.poll():
                assert isinstance(work.item, Trajectory)
                seen.append(work.item.uid)
                consumer.finish([work], ())
            consumer.commit()

        until(lambda: "after" in seen and len(consumer.offsets()) == 2, turn)
    dead = [m for m in messages(log.copy, DEAD_LETTERS) if m.value is not None]
    assert [m.value for m in dead] == [b"\x00odd too"]
    with Dataset(log.copy, STEPS, SelectionSettings()) as dataset:
        assert {one.uid for one in dataset} == {"after"}


def test_a_tenant_goes_with_all_that_names_it(log: Log) -> None:
    told = log.delete(tenant="acme", dry_run=True, into_prefix=None)
    assert f"{log.connection.topic_name(STEPS)}: 4 records would be deleted" in told
    assert topics.find_topics(log.copy) == {}
    log.delete(tenant="acme")
    left = repr(everything(log.copy).values())
    assert "acme" not in left
    assert log.uid not in left


def test_a_run_goes_with_its_ledger(log: Log) -> None:
    write(log.connection, STEPS, [step("o-0", "o", run="other"), end("o", run="other")])
    log.delete(of_run="run")
    left = live_records(log.copy, STEPS)
    assert {getattr(record, "trajectory_uid", "") for record in left} == {"o"}
    assert live_records(log.copy, LEDGER) == []


KILLED = """
import os, signal, sys
from replay.deletion import topic_copy
from replay.deletion.command import delete
from replay.settings import DeleteSettings
put, left = topic_copy.TopicCopy._put, int(sys.argv[4])
def killing(self, *given):
    global left
    put(self, *given)
    left -= 1
    if not left:
        self._producer.flush(30)
        os.kill(os.getpid(), signal.SIGKILL)
topic_copy.TopicCopy._put = killing
prefix = sys.argv[2]
delete(DeleteSettings(bootstrap=sys.argv[1], topic_prefix=prefix,
    into_prefix=f"copy-{prefix}", trajectory=(sys.argv[3],)), print)
"""


def test_a_killed_copy_is_gone_on_with(log: Log) -> None:
    prefix = log.connection.topic_prefix
    for records_more in (2, 9):
        command = [sys.executable, "-c", KILLED, log.connection.bootstrap, prefix, log.uid]
        ended = processes.run(
            [*command, str(records_more)], env={**os.environ, "PYTHONPATH": "."}, timeout=120
        )
        assert ended.returncode == -signal.SIGKILL
    write(log.connection, STEPS, run_of("later"))
    log.delete(trajectory=(log.uid,))
    before, after = everything(log.connection), everything(log.copy)
    kept = {
        at: found for at, found in before.items() if log.uid.encode() not in repr(found).encode()
    }
    assert {at: after[at] for at in kept} == kept
    assert "later" in {getattr(r, "trajectory_uid", "") for r in live_records(log.copy, STEPS)}


def live_records(connection: Connection, topic: str) -> list[Record]:
    return [Codec().decode(m.value) for m in messages(connection, topic) if m.value is not None]


def test_a_copy_that_was_begun_otherwise_is_refused(log: Log) -> None:
    log.delete(trajectory=("nobody",))
    with pytest.raises(Fatal, match=r"\S+ still names deleted data in \d records: offset"):
        log.delete(trajectory=(log.uid,))


@pytest.mark.parametrize(
    "given", [{}, {"trajectory": ("t",)}, {"tenant": "t", "into_prefix": "steplog."}]
)
def test_it_must_be_said_what_goes_and_where_the_rest_does(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nothing to delete|set into_prefix|must differ"):
        DeleteSettings(**given)


def test_the_original_leaves_the_disk(log: Log, kafka: local_kafka.Broker) -> None:
    """Brokers keep files for a minute after a topic is deleted."""
    assert folders(kafka, log.connection)
    log.delete(trajectory=(log.uid,), and_delete_original=True)
    until(lambda: topics.find_topics(log.connection) == {}, lambda: time.sleep(0.1))
    until(lambda: not folders(kafka, log.connection), lambda: time.sleep(1), limit=240)
    assert folders(kafka, log.copy)


def folders(kafka: local_kafka.Broker, connection: Connection) -> list[Path]:
    return list((kafka.directory / "data").glob(f"{connection.topic_prefix}*"))
