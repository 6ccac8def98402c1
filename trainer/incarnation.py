"""One life of the trainer of a live run: alone in its group, fenced off from the lives before it.

It begins in this order, and each step is why the next is safe:

1. Wait until nobody is in the consumer group: a trainer that lives is not disturbed, a spare waits.
2. Take the run's transactional id. Whoever had it can commit nothing any more.
3. Read `policy` and `ledger`. Nobody else can add to them now.
4. Commit `started` with the next incarnation: gateways send nothing to engines of earlier ones.
5. Join the group, with the first poll.
"""

import logging
from collections.abc import Callable

from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.consumers.membership import wait_until_empty
from pool.core.groups import GroupAssembler, GroupRules
from trainer.deciding.waiting import Item
from trainer.life import Life

log = logging.getLogger(__name__)


class Incarnation(Life):
    """All writing goes through one fenced producer, in the thread that polls the consumer."""

    consumer: StatefulConsumer[Item]

    def __init__(
        self,
        connection: Connection,
        run: str,
        group: str,
        topic: str,
        rules: GroupRules,
        max_waiting: int,
        probe: Callable[[str], None],
        accept_loss: bool = False,
    ) -> None:
        self.group = group
        self._rules = rules
        self.consumer = StatefulConsumer(
            connection,
            topic=topic,
            group=group,
            transactional_id=transactional_id(connection, run),
            assembler=self._assembler,
            codec=connection.codec(),
            max_waiting=max_waiting,
            accept_loss=accept_loss,
            probe=probe,
        )
        super().__init__(connection, run, topic)
        self.write(self.started())

    def _assembler(self, partition: int) -> GroupAssembler:
        self.assemblers[partition] = GroupAssembler(
            self._rules, self.ledger.decided_groups(partition), self.ledger.decided_others()
        )
        return self.assemblers[partition]


def transactional_id(connection: Connection, run: str) -> str:
    """One per run, whoever trains it: the newest life fences the others off."""
    return f"{connection.topic_prefix}trainer-{run}"


def wait_until_alone(connection: Connection, group: str, is_stopped: Callable[[], bool]) -> None:
    wait_until_empty(
        connection,
        group,
        is_stopped,
        lambda: log.info("group %s has a trainer; waiting to take over when it leaves", group),
    )
