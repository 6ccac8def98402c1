"""A live decider whose batches nobody trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pool.connection import Connection
from pool.topics import LEDGER, REWARDED
from schemas import Decision
from tests.pool.log import committed
from tests.trainer.agents import RUN
from trainer.algorithm.settings import LossSettings
from trainer.decisions.judge import Judge
from trainer.decisions.live_decider import LiveDecider
from trainer.decisions.settings import DecisionSettings
from trainer.incarnation.live import LiveIncarnation

GROUP = "deciders"
PATIENCE = 60.0


class DeciderRun:
    """A decider of one incarnation, from its start to its last verdict."""

    def __init__(
        self, connection: Connection, verdicts_every: float, max_waiting: int, **fields: Any
    ) -> None:
        self.settings = DecisionSettings(**{"groups_per_batch": 2, **fields})
        rules = self.settings.group_rules()
        self.incarnation = LiveIncarnation(
            connection, RUN, GROUP, REWARDED, rules, max_waiting, lambda _: None
        )
        judge = Judge(self.settings, self.incarnation.marks, LossSettings())
        self.decider = LiveDecider(
            self.incarnation,
            self.settings,
            judge,
            lambda sequence: {},
            verdicts_every=verdicts_every,
        )
        self.decider.start()

    def open(self, version: int) -> None:
        self.decider.submit(lambda: self.incarnation.open_version(version)).result(PATIENCE)

    def next_batch(self, version: int) -> Decision:
        return self.decider.next_batch(version).result(PATIENCE)


@contextmanager
def running_decider(
    connection: Connection, verdicts_every: float = 0.2, max_waiting: int = 1_000, **fields: Any
) -> Iterator[DeciderRun]:
    run = DeciderRun(connection, verdicts_every, max_waiting, **fields)
    try:
        yield run
    finally:
        run.decider.close()


def decisions(connection: Connection) -> list[Decision]:
    return [record for record in committed(connection, LEDGER) if isinstance(record, Decision)]


def trained(decision: Decision) -> list[str]:
    return [group.prompt_uid for group in decision.groups if group.verdict == "train"]


def verdicts(connection: Connection) -> dict[str, str]:
    """What became of every trajectory; each has one verdict."""
    found: dict[str, str] = {}
    for decision in decisions(connection):
        for group in decision.groups:
            for member in group.members:
                assert member.trajectory_uid not in found, "decided twice"
                own = member.verdict if member.verdict != "train" else group.verdict
                found[member.trajectory_uid] = own
        for other in decision.others:
            assert other.trajectory_uid not in found, "decided twice"
            found[other.trajectory_uid] = other.verdict
    return found
