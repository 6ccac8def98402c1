"""Where topics end, asked by a client that lives longer than a broker."""

import threading
from pathlib import Path

import pytest
from confluent_kafka import Producer

from pool import topics
from pool.connection import Connection
from pool.readers.end_offsets import EndOffsets, wait_until_readable
from pool.topics import REWARDED, STEPS
from steplog.kafka import local_kafka
from tests.conftest import free_port, kill
from tests.pool.log import write
from tests.pool.records import run_of

pytestmark = pytest.mark.broker


@pytest.mark.slow
def test_ends_are_told_after_the_broker_was_killed_and_came_back(tmp_path: Path) -> None:
    """Its partitions have a new leader epoch then, and a client that knows the old one is refused."""
    port = free_port()
    broker = local_kafka.start(tmp_path, port)
    connection = Connection(bootstrap=broker.bootstrap)
    try:
        topics.create(connection, partitions=2)
        ends = EndOffsets(connection, STEPS, REWARDED)
        assert sum(ends.sample()[STEPS]) == 0
        for killed in (1, 2):
            kill(broker)
            broker = local_kafka.start(tmp_path, port)
            write(connection, STEPS, run_of(f"t{killed}"))
            assert sum(ends.sample()[STEPS]) == 2 * killed
    finally:
        local_kafka.stop(tmp_path)


def test_one_can_wait_until_readers_see_what_was_committed(connection: Connection) -> None:
    topics.create(connection, partitions=1)
    producer = Producer(connection.confluent() | {"transactional.id": "waiting"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(connection.topic_name(STEPS), b"anything")
    producer.flush()
    ends = EndOffsets(connection, STEPS)
    assert (ends.sample()[STEPS], ends.sample_readable()[STEPS]) == ([1], [0])
    waiting = threading.Thread(target=wait_until_readable, args=(connection, STEPS))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    producer.commit_transaction(30)
    waiting.join(30)
    assert not waiting.is_alive()
    assert ends.sample_readable() == ends.sample()
