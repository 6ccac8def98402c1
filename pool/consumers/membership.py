"""How many members a consumer group has, for a process that must be the only one."""

import time
from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from pool.connection import Connection
from servicekit.errors import BrokerUnavailable

REQUEST_TIMEOUT_S = 10.0
POLL_EVERY_S = 0.5
"""Seconds between two requests; a member that was killed leaves when its session times out."""


def count_members(connection: Connection, group: str, patience: float = 30.0) -> int:
    """How many members a group has now; a group that does not exist has none."""
    admin = AdminClient(connection.confluent())
    deadline = time.monotonic() + patience
    while True:
        future = admin.describe_consumer_groups([group], request_timeout=REQUEST_TIMEOUT_S)[group]
        try:
            return len(future.result(REQUEST_TIMEOUT_S).members)
        except TimeoutError:
            reason = "no answer"
        except KafkaException as error:
            if error.args[0].name() == "GROUP_ID_NOT_FOUND":
                return 0
            reason = error.args[0].name()
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"{connection.bootstrap} does not list the members of group {group}: {reason}"
            )
        time.sleep(POLL_EVERY_S)  # a broker that has just started is still loading its groups


def wait_until_empty(
    connection: Connection,
    group: str,
    is_stopped: Callable[[], bool],
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Returns when the group has no members, or when `is_stopped`. `on_wait` is called once if there
    are members to wait for."""
    has_waited = False
    while not is_stopped() and count_members(connection, group):
        if not has_waited:
            on_wait()
            has_waited = True
        time.sleep(POLL_EVERY_S)
