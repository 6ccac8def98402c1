"""Who is in a consumer group, for a process that must be the only one."""

import time
from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from pool.connection import Connection
from servicekit.errors import BrokerUnavailable

TIMEOUT = 10.0
LOOK_EVERY = 0.5
"""Seconds between two looks; a member that was killed leaves when its session times out."""


def count_members(connection: Connection, group: str, patience: float = 30.0) -> int:
    """How many members a group has now; a group that never was has none."""
    admin = AdminClient(connection.confluent())
    deadline = time.monotonic() + patience
    while True:
        asked = admin.describe_consumer_groups([group], request_timeout=TIMEOUT)[group]
        try:
            return len(asked.result(TIMEOUT).members)
        except TimeoutError:
            reason = "no answer"
        except KafkaException as error:
            if error.args[0].name() == "GROUP_ID_NOT_FOUND":
                return 0
            reason = error.args[0].name()
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"{connection.bootstrap} does not say who is in group {group}: {reason}"
            )
        time.sleep(LOOK_EVERY)  # a broker that has just started is still loading its groups


def wait_until_empty(
    connection: Connection,
    group: str,
    is_stopped: Callable[[], bool],
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Returns when nobody is in the group, or when we are asked to stop; `waiting` is called once if
    somebody is."""
    told = False
    while not is_stopped() and count_members(connection, group):
        if not told:
            waiting()
            told = True
        time.sleep(LOOK_EVERY)
