"""A selection finds what it names, wherever it lies, and says what is wrong with one that cannot be."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Producer as ConfluentProducer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import TopicPartition
from pydantic import ValidationError

from pool import topics
from pool.connection import Connection
from pool.producers.output import producer_options
from pool.readers.dataset import Dataset
from pool.readers.scan import OffsetRange, Scan
from pool.readers.selection import Selection, SelectionSettings, find_ranges
from pool.topics import POLICY, REWARDED, STEPS
from schemas import Codec, PolicyVersion
from servicekit.errors import Fatal, OffsetLost
from tests.pool.log import write
from tests.pool.records import RUN, end, run_of, step, trajectory_of


def selected(connection: Connection, topic: str = STEPS, **settings: Any) -> set[str]:
    with Dataset(connection, topic, SelectionSettings(**settings)) as dataset:
        return {trajectory.uid for trajectory in dataset}


@pytest.fixture
def log(connection: Connection) -> Connection:
    topics.create(connection, partitions=2)
    return connection


def test_a_filter_looks_at_run_channel_versions_and_metadata() -> None:
    made = trajectory_of(
        step("s", version=3, metadata='{"task": {"name": "sums"}}'),
        end(channel="val", metadata='{"seed": 7}'),
    )
    fits: list[dict[str, Any]] = [
        {"of_run": (RUN, "other")},
        {"of_run": (RUN,), "from_version": 3, "to_version": 3},
        {"where": ("task.name=sums", "seed=7")},
    ]
    differs: list[dict[str, Any]] = [
        {"of_run": ("other",)},
        {"of_run": (RUN,), "from_version": 4},
        {"of_run": (RUN,), "to_version": 2},
        {"where": ("seed=8",)},
        {"where": ("task=sums",)},
    ]
    assert all(Selection(SelectionSettings(**given)).matches(made) for given in fits)
    assert not any(Selection(SelectionSettings(**given)).matches(made) for given in differs)
    assert Selection(SelectionSettings(), channel="val").matches(made)
    assert not Selection(SelectionSettings(), channel="train").matches(made)


@pytest.mark.parametrize(
    "given",
    [
        {"from_version": 1},
        {"of_run": ("a", "b"), "to_version": 1},
        {"of_run": ("a",), "from_version": 3, "to_version": 2},
        {"where": ("seed",)},
        {"from_": "yesterday"},
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SelectionSettings(**given)


@pytest.mark.broker
def test_a_range_has_what_ended_in_it_though_it_began_before(log: Connection) -> None:
    early, early_end = run_of("early")
    late, late_end = run_of("late")
    places = write(log, STEPS, [early, late, early_end, late_end])
    assert len({place.partition for place in places}) == 1
    assert selected(log) == {"early", "late"}
    assert selected(log, until=3) == {"early"}
    assert selected(log, from_=3) == {"late"}


@pytest.mark.broker
def test_a_range_of_times(log: Connection) -> None:
    write(log, STEPS, run_of("before"))
    time.sleep(0.01)
    between = datetime.now(UTC)
    write(log, STEPS, run_of("after"))
    assert selected(log, until=between.isoformat()) == {"before"}
    assert selected(log, from_=between.isoformat()) == {"after"}


@pytest.mark.broker
def test_versions_are_looked_for_from_their_mark_on(log: Connection) -> None:
    for version, name in enumerate(("zero", "one")):
        opened = PolicyVersion(
            run=RUN,
            incarnation=1,
            version=version,
            phase="opened",
            steps_marks=[2 * version, 2 * version],
        )
        write(log, POLICY, [opened])
        write(log, STEPS, [step(f"{name}-0", name, version=version), end(name)])
    settings = SelectionSettings(of_run=(RUN,), from_version=1)
    assert {span.first for span in find_ranges(log, STEPS, settings).by_partition.values()} >= {2}
    assert selected(log, of_run=(RUN,), from_version=1) == {"one"}
    assert selected(log, of_run=(RUN,), to_version=0) == {"zero"}
    with pytest.raises(
        Fatal, match=r"Version 7 of run run does not exist; the newest version is 1"
    ):
        selected(log, of_run=(RUN,), from_version=7)


@pytest.mark.broker
def test_a_range_that_cannot_be_read_is_one_sentence(log: Connection) -> None:
    with pytest.raises(Fatal, match=r"steps is empty"):
        selected(log)
    [place, _] = write(log, STEPS, run_of("gone"))
    write(log, STEPS, run_of("kept"))
    with pytest.raises(Fatal, match=r"The range selects nothing of .*steps"):
        selected(log, from_=1_000)
    cut = TopicPartition(log.topic_name(STEPS), place.partition, 2)
    admin = AdminClient(log.confluent())
    for future in admin.delete_records([cut]).values():
        future.result(10)
    with pytest.raises(OffsetLost, match=r"Offset 1 of partition . of .* has expired"):
        selected(log, from_=1)
    assert selected(log) == {"kept"}


@pytest.mark.broker
def test_a_scan_passes_over_what_transactions_leave(log: Connection) -> None:
    """Aborted records and markers take offsets; a scan ends all the same, having seen neither."""
    codec = Codec()
    values = [codec.encode(record) for record in run_of("t")]
    producer = ConfluentProducer(producer_options(log, transactional_id=log.topic_prefix))
    producer.init_transactions(30)
    for finish in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        for value in values:
            producer.produce(log.topic_name(STEPS), value, partition=0)
        producer.flush(30)
        finish(30)
    with Scan(log, STEPS, {0: OffsetRange(0, 6), 1: OffsetRange(0, 0)}) as scan:
        assert [message.value() for message in scan] == values
        assert scan.done == scan.total == 6


@pytest.mark.broker
def test_a_tag_has_a_topic_of_its_own(log: Connection) -> None:
    assert topics.create_rewarded_topic(log, "second") is True
    assert topics.create_rewarded_topic(log, "second") is False
    found = topics.check(log)
    assert found["rewarded.second"] == found[REWARDED]
    with pytest.raises(
        Fatal, match=r"rewarded\.third not found .* `steplog replay rescore --into`"
    ):
        topics.check_rewarded_topic(found, log, topics.rewarded_topic("third"))
    with pytest.raises(Fatal, match=r"lower-case letters, digits and dashes"):
        topics.rewarded_topic("Über.alles")
