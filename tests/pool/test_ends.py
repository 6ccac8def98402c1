"""Where topics end, asked by a client that lives longer than a broker."""

from pathlib import Path

import pytest

from pool import topics
from pool.connection import Connection
from pool.ends import Ends
from pool.topics import REWARDED, STEPS
from steplog import local_kafka
from tests.conftest import free_port, kill
from tests.pool.log import write
from tests.pool.records import run_of

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def test_ends_are_told_after_the_broker_was_killed_and_came_back(tmp_path: Path) -> None:
    """Its partitions have a new leader epoch then, and a client that knows the old one is refused."""
    port = free_port()
    broker = local_kafka.start(tmp_path, port)
    connection = Connection(bootstrap=broker.bootstrap)
    try:
        topics.create(connection, partitions=2)
        ends = Ends(connection, STEPS, REWARDED)
        assert sum(ends.sample()[STEPS]) == 0
        for killed in (1, 2):
            kill(broker)
            broker = local_kafka.start(tmp_path, port)
            write(connection, STEPS, run_of(f"t{killed}"))
            assert sum(ends.sample()[STEPS]) == 2 * killed
    finally:
        local_kafka.stop(tmp_path)
