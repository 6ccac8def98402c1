"""One incarnation of the trainer of a live run: the only member of its consumer group, with all earlier
incarnations fenced off.

It starts in this order; each step makes the next one safe:

1. Wait until the consumer group is empty: a running trainer is not disturbed, and a spare one waits.
2. Take the run's transactional id. Whoever held it before can commit nothing any more.
3. Read `policy` and `ledger`. Nobody else can add to them now.
4. Commit `started` with the next incarnation number: from now on gateways send no calls to engines
   that hold weights of earlier incarnations. It also says how many groups a batch has, from which
   gateways derive how many may be in flight, and whether engines keep their KV cache over updates.
5. Join the consumer group, with the first poll.
"""

import logging
from collections.abc import Callable

import msgspec

from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.consumers.membership import wait_until_empty
from pool.core.group_assembler import GroupAssembler
from pool.core.groups import GroupRules
from trainer.incarnation.base import Incarnation
from trainer.incarnation.source import GroupItem

log = logging.getLogger(__name__)


class LiveIncarnation(Incarnation):
    """All writes go through one fenced producer, in the thread that polls the consumer."""

    consumer: StatefulConsumer[GroupItem]

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
        groups_per_batch: int | None = None,
        keep_kv: bool = False,
    ) -> None:
        self.group = group
        self._rules = rules
        self.consumer = StatefulConsumer(
            connection,
            topic=topic,
            group=group,
            transactional_id=transactional_id(connection, run),
            assembler=self._make_assembler,
            codec=connection.codec(),
            max_waiting=max_waiting,
            accept_loss=accept_loss,
            probe=probe,
        )
        super().__init__(connection, run, topic)
        started = msgspec.structs.replace(
            self.started_record(), groups_per_batch=groups_per_batch, keep_kv=keep_kv
        )
        self.write(started)

    def _make_assembler(self, partition: int) -> GroupAssembler:
        self.assemblers[partition] = GroupAssembler(
            self._rules, self.ledger.decided_groups(partition), self.ledger.decided_others()
        )
        return self.assemblers[partition]


def transactional_id(connection: Connection, run: str) -> str:
    """One per run, whichever process trains it: the newest incarnation fences the others off."""
    return f"{connection.topic_prefix}trainer-{run}"


def wait_until_alone(connection: Connection, group: str, is_stopped: Callable[[], bool]) -> None:
    """Waits until the consumer group has no member."""
    wait_until_empty(
        connection,
        group,
        is_stopped,
        lambda: log.info(
            "consumer group %s already has a trainer; waiting to take over when it leaves", group
        ),
    )
