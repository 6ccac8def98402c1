"""The stateful consumer on a real broker, without killing processes: see test_kill_loops for that.

Leaving a `with` by an error commits nothing, which is what a crash does, but faster.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import Producer as ConfluentProducer
from confluent_kafka.admin import AdminClient

from pool import topics
from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.consumers.transaction import read_offsets
from pool.core.bookmark import Bookmark
from pool.core.progress import WorkItem
from pool.core.trajectories import (
    StrayRecord,
    Trajectory,
    TrajectoryAssembler,
    annotate,
    source_position,
)
from pool.producers.output import Output, producer_options
from pool.readers.end_offsets import wait_until_readable
from pool.topics import DEAD_LETTERS, REWARDED, STEPS
from schemas import Record, Step
from servicekit.errors import Fenced, OffsetLost, TooManyPoison
from tests.pool.log import identity, messages, records, until, write
from tests.pool.records import end, step

pytestmark = pytest.mark.broker

Item = Trajectory | StrayRecord
GROUP = "group"


class Crash(Exception):
    """Ends a consumer as abruptly as a `with` can."""


@pytest.fixture
def log(connection: Connection) -> Connection:
    """One partition, so that offsets are easy to name."""
    topics.create(connection, partitions=1)
    return connection


@pytest.fixture(params=["consumer", "classic"])
def parted(connection: Connection, request: pytest.FixtureRequest) -> Connection:
    """Four partitions, to be shared by members under either protocol."""
    topics.create(connection, partitions=4)
    return connection.model_copy(update={"group_protocol": request.param})


def consumer(
    connection: Connection,
    topic: str = STEPS,
    *,
    name: str = "a",
    memory: int = 100,
    max_waiting: int = 2_000,
    probe: Callable[[str], None] = lambda stage: None,
) -> StatefulConsumer[Item]:
    return StatefulConsumer(
        connection,
        topic=topic,
        group=f"{GROUP}-{connection.topic_prefix}",
        transactional_id=f"{connection.topic_prefix}{name}",
        assembler=lambda partition: TrajectoryAssembler(memory),
        codec=connection.codec(),
        max_waiting=max_waiting,
        patience=30,
        probe=probe,
    )


def copies(connection: Connection, item: Item) -> list[Output]:
    received = item.records if isinstance(item, Trajectory) else [item.received]
    topic, codec = connection.topic_name(REWARDED), connection.codec()
    return [
        Output(topic, "key", codec.encode(annotate(one.record, source_position(one))))
        for one in received
    ]


def copy_all(connection: Connection, reader: StatefulConsumer[Item]) -> None:
    """One turn of a worker that finishes everything at once."""
    for work in reader.poll():
        reader.finish([work], copies(connection, work.item))
    reader.commit()


def trajectories(*uids: str) -> list[Record]:
    return [
        record
        for uid in uids
        for record in (step(f"{uid}-0", uid), step(f"{uid}-1", uid, index=1), end(uid, steps=2))
    ]


def committed(connection: Connection, partition: int = 0) -> TopicPartition:
    reader = Consumer(connection.confluent(group_id=f"{GROUP}-{connection.topic_prefix}"))
    place = TopicPartition(connection.topic_name(STEPS), partition)
    (found,) = read_offsets(reader, [place], patience=30)
    reader.close()
    return found


def poll_works(reader: StatefulConsumer[Item], count: int) -> list[WorkItem[Item]]:
    works: list[WorkItem[Item]] = []
    until(lambda: len(works) >= count, lambda: works.extend(reader.poll()))
    return works


def copied(connection: Connection) -> Counter[str]:
    wait_until_readable(connection, REWARDED)
    return Counter(identity(record) for record in records(connection, REWARDED))


def test_more_than_may_wait_is_rebuilt_and_handed_out(
    log: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crowd left pending comes batch by batch, to a consumer that must not have a crowd."""
    write(log, STEPS, trajectories("t1", "t2", "t3"))
    with consumer(log) as reader:
        poll_works(reader, 3)
        until(reader.commit, lambda: None)
    monkeypatch.setattr("pool.consumers.consumer.BATCH", 1)
    with consumer(log, max_waiting=1) as reader:
        works = poll_works(reader, 3)
    assert [work.item.uid for work in works if isinstance(work.item, Trajectory)] == [
        "t1",
        "t2",
        "t3",
    ]


def test_each_record_is_copied_once(log: Connection) -> None:
    written = trajectories("t1", "t2")
    write(log, STEPS, written)
    with consumer(log) as reader:
        until(lambda: len(copied(log)) == 6, lambda: copy_all(log, reader))
    assert copied(log) == Counter(identity(record) for record in written)


def test_what_was_finished_but_not_committed_before_a_crash_is_done_again(log: Connection) -> None:
    write(log, STEPS, trajectories("t1"))
    with pytest.raises(Crash), consumer(log) as reader:
        (work,) = poll_works(reader, 1)
        reader.finish([work], copies(log, work.item))
        raise Crash
    assert not copied(log)
    with consumer(log) as reader:
        until(lambda: bool(copied(log)), lambda: copy_all(log, reader))
    assert set(copied(log).values()) == {1}


def test_an_item_that_was_pending_at_a_crash_runs_again_and_the_finished_ones_do_not(
    log: Connection,
) -> None:
    write(log, STEPS, trajectories("slow", "quick"))
    with pytest.raises(Crash), consumer(log) as reader:
        slow, quick = poll_works(reader, 2)
        reader.finish([quick], copies(log, quick.item))
        assert reader.commit()
        raise Crash
    place = committed(log)
    assert place.offset == 6
    assert Bookmark.parse(place.metadata, place.offset) == Bookmark(0, (slow.offset,))
    with consumer(log) as reader:
        (again,) = poll_works(reader, 1)
        assert isinstance(again.item, Trajectory)
        assert again.item.uid == "slow"
        reader.finish([again], copies(log, again.item))
        assert reader.commit()
    assert copied(log) == Counter(identity(r) for r in trajectories("slow", "quick"))


def test_an_open_trajectory_is_rebuilt_and_lag_stays_true(log: Connection) -> None:
    write(log, STEPS, [*trajectories("done"), step("open-0", "open")])
    with consumer(log) as reader:
        until(lambda: len(copied(log)) == 3, lambda: copy_all(log, reader))
    assert committed(log).offset == 4, "the open Step is processed, so it is no lag"
    write(log, STEPS, [step("open-1", "open", index=1), end("open", steps=2)])
    with consumer(log) as reader:
        until(lambda: len(copied(log)) == 6, lambda: copy_all(log, reader))
    assert set(copied(log).values()) == {1}


def test_lag_reaches_zero_behind_transaction_markers(log: Connection) -> None:
    """`rewarded` ends with a marker, which is an offset that no record has."""
    writer = ConfluentProducer(
        producer_options(log, transactional_id=f"{log.topic_prefix}writer", retry_backoff_ms=5)
    )
    writer.init_transactions(30)
    for uid in ("t1", "t2"):
        writer.begin_transaction()
        for record in trajectories(uid):
            writer.produce(log.topic_name(STEPS), log.codec().encode(record), "key")
        writer.commit_transaction(30)
    with consumer(log) as reader:
        until(lambda: committed(log).offset == 8, lambda: copy_all(log, reader))
    assert committed(log).offset == 8, "six records and two markers"


def test_an_aborted_transaction_is_carried_by_the_next_one(log: Connection) -> None:
    write(log, STEPS, trajectories("t1"))
    with consumer(log) as reader:
        not_joined = reader._consumer.consumer_group_metadata()
        (work,) = poll_works(reader, 1)
        reader.finish([work], copies(log, work.item))
        reader._membership = not_joined
        assert not reader.commit(), "the broker refuses a member that it does not know"
        assert not copied(log)
        until(lambda: bool(copied(log)), lambda: copy_all(log, reader))
    assert set(copied(log).values()) == {1}


def test_a_commit_that_the_group_does_not_have_is_done_again(log: Connection) -> None:
    """As after a broker that lost it; the partition is paused at that moment."""
    write(log, STEPS, trajectories("t1", "t2"))
    with consumer(log, max_waiting=1) as reader:
        lost = poll_works(reader, 2)
        reader.poll()
        assert reader._partitions[0].paused
        reader._partitions[0].saved = (6, Bookmark(6).encode())
        reader._must_verify = True
        again = poll_works(reader, 2)
        for work in (*lost, *again):
            reader.finish([work], copies(log, work.item))
        assert reader.commit()
    assert copied(log) == Counter(identity(r) for r in trajectories("t1", "t2"))


def test_outputs_of_one_finish_are_committed_together_with_their_offsets(log: Connection) -> None:
    write(log, STEPS, trajectories("t1", "t2"))
    seen: list[int] = []

    def outputs(offsets: Sequence[object]) -> list[Output]:
        seen.extend(getattr(at, "committed") for at in offsets)  # noqa: B009
        return [Output(log.topic_name(REWARDED), "key", b"both")]

    with consumer(log) as reader:
        works = poll_works(reader, 2)
        reader.finish(works, outputs)
        assert reader.commit()
    wait_until_readable(log, REWARDED)
    assert [message.value for message in messages(log, REWARDED)] == [b"both"]
    assert seen == [6] == [committed(log).offset]


def test_a_record_that_cannot_be_decoded_goes_to_dead_letters_once(log: Connection) -> None:
    write(log, STEPS, [step("t1-0", "t1")])
    produce_raw(log, [b"garbage"], headers=[("traceparent", b"00-1")])
    write(log, STEPS, [end("t1", steps=1)])
    for _ in range(2):  # reading it again while rebuilding writes no second letter
        with consumer(log) as reader:
            until(lambda: committed(log).offset == 3, lambda: copy_all(log, reader))
            copy_all(log, reader)
    wait_until_readable(log, DEAD_LETTERS)
    (letter,) = messages(log, DEAD_LETTERS)
    assert (letter.key, letter.value) == (b"key", b"garbage")
    headers = dict(letter.headers)
    assert headers["traceparent"] == b"00-1"
    assert headers["steplog.topic"] == log.topic_name(STEPS).encode()
    assert (headers["steplog.partition"], headers["steplog.offset"]) == (b"0", b"1")
    assert b"no framing of ours" in headers["steplog.reason"]
    assert len(copied(log)) == 2, "the trajectory around it went on"


def test_a_broken_deployment_stops_again_after_every_restart(log: Connection) -> None:
    write(log, STEPS, trajectories("t1"))
    produce_raw(log, [b"from the future"] * 300)
    for _ in range(3):
        with pytest.raises(TooManyPoison, match="check that this version fits"), consumer(log) as r:
            until(lambda: False, lambda: copy_all(log, r))
    assert len(messages(log, DEAD_LETTERS)) < 100, "restarts do not drain the topic bit by bit"


def test_retention_that_deleted_open_state_stops_the_consumer(log: Connection) -> None:
    write(log, STEPS, [step("open-0", "open"), *trajectories("t1")])
    with consumer(log) as reader:
        until(lambda: committed(log).offset == 4, lambda: copy_all(log, reader))
    admin = AdminClient(log.confluent())
    place = TopicPartition(log.topic_name(STEPS), 0, 2)
    next(iter(admin.delete_records([place]).values())).result(30)
    with pytest.raises(OffsetLost, match="the state at offset 0"), consumer(log) as reader:
        until(lambda: False, lambda: copy_all(log, reader))


def test_reading_stops_while_too_much_waits_and_goes_on_after(log: Connection) -> None:
    uids = [f"t{number}" for number in range(400)]
    write(log, STEPS, trajectories(*uids))
    with consumer(log, max_waiting=50) as reader:
        works = poll_works(reader, 50)
        for _ in range(5):
            works += reader.poll()
        assert len(works) <= 50 + 500, "at most one batch more than allowed"
        assert len(works) < len(uids)
        for work in works:
            reader.finish([work], copies(log, work.item))
        until(lambda: copied(log).total() == 1200, lambda: copy_all(log, reader))
    assert set(copied(log).values()) == {1}


def test_a_bookmark_never_outgrows_what_a_broker_takes(log: Connection) -> None:
    """Nothing finishes, so every item stays listed; reading must pause before 4 KiB are full."""
    write(log, STEPS, trajectories(*(f"t{number}" for number in range(4_000))))
    with consumer(log, max_waiting=100_000) as reader:
        works = poll_works(reader, 1)
        for _ in range(40):
            works += reader.poll(0.05)
            assert reader.commit()
        assert 500 < len(works) < 4_000
        for work in works:
            reader.finish([work], [])
        assert reader.commit()
        assert poll_works(reader, 1), "it goes on when there is room"


def test_skipping_leaves_out_what_is_too_old(log: Connection) -> None:
    write(log, STEPS, trajectories("t1"))
    with consumer(log) as reader:
        until(lambda: committed(log).offset == 3, lambda: copy_all(log, reader))
        write(log, STEPS, trajectories("old", "new"))
        skipped = reader.skip(0, 6)
        assert skipped is not None
        assert (skipped.partition, skipped.first, skipped.end) == (0, 3, 6)
        assert reader.skip(0, 6) is None, "nothing is left to skip"
        until(lambda: committed(log).offset == 9, lambda: copy_all(log, reader))
    wait_until_readable(log, REWARDED)
    assert {r.trajectory_uid for r in records(log, REWARDED) if isinstance(r, Step)} == {
        "t1",
        "new",
    }


def test_partitions_move_to_a_new_member_and_each_record_is_copied_once(
    parted: Connection,
) -> None:
    first = [r for n in range(40) for r in spread(n)]
    write(parted, STEPS, first)
    with consumer(parted, name="a") as a:
        until(lambda: copied(parted).total() >= 30, lambda: copy_all(parted, a))
        with consumer(parted, name="b") as b:

            def both() -> None:
                copy_all(parted, a)
                copy_all(parted, b)

            until(lambda: bool(a.offsets()) and bool(b.offsets()), both)
            second = [r for n in range(40, 80) for r in spread(n)]
            write(parted, STEPS, second)
            until(lambda: copied(parted).total() >= 240, both)
            assert len(a.offsets()) + len(b.offsets()) == 4
        until(lambda: len(a.offsets()) == 4, lambda: copy_all(parted, a))
    assert copied(parted) == Counter(identity(r) for r in first + second)


def test_work_of_a_lost_partition_is_dropped_and_its_bundle_is_void(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    write(connection, STEPS, [r for n in range(40) for r in spread(n)])
    with consumer(connection, name="a") as a:
        works = poll_works(a, 40)
        with consumer(connection, name="b") as b:

            def both() -> None:
                works.extend(a.poll(0.05))
                b.poll(0.05)

            until(lambda: bool(b.offsets()), both)
            kept = {at.partition for at in a.offsets()}
            a.finish(works, [Output(connection.topic_name(REWARDED), "key", b"void")])
            a.commit()
            again = a.poll(0.1)
            assert {w.assignment.partition for w in again} == kept
            assert len(again) == sum(w.assignment.partition in kept for w in works)
    assert not messages(connection, REWARDED)


def test_who_was_fenced_and_joins_again_ends_although_there_is_nothing_to_commit(
    parted: Connection,
) -> None:
    with pytest.raises(Fenced), consumer(parted) as fenced:
        until(lambda: len(fenced.offsets()) == 4, lambda: copy_all(parted, fenced))
        fenced.commit()
        with consumer(parted) as owner:

            def both() -> None:
                copy_all(parted, owner)
                copy_all(parted, fenced)

            until(lambda: False, both)


def spread(number: int) -> list[Record]:
    uid, prompt = f"t{number}", f"p{number}"
    steps: Iterable[Record] = (step(f"{uid}-{i}", uid, prompt, index=i) for i in range(2))
    return [*steps, end(uid, prompt, steps=2)]


def produce_raw(connection: Connection, values: Sequence[bytes], headers: Any = ()) -> None:
    producer = ConfluentProducer(producer_options(connection))
    for value in values:
        producer.produce(connection.topic_name(STEPS), value, "key", headers=list(headers))
    producer.flush()
