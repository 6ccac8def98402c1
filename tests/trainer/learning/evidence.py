"""What a run left in the log: what every version was trained with, and what came of it."""

from dataclasses import dataclass
from functools import cached_property

from pool.connection import Connection
from pool.core.ledger import Ledger
from pool.core.marks import PolicyMarks
from pool.readers.decision_batch import trained_members
from pool.topics import LEDGER, POLICY, REWARDED, STEPS
from schemas import Decision, Outcome, PolicyVersion, Position, Record, Step, TrajectoryEnd
from tests.pool.log import messages, records


@dataclass(frozen=True, slots=True)
class Trained:
    """What made a version."""

    version: int
    steps: list[Step]
    ends: list[TrajectoryEnd]
    outcome: Outcome

    @property
    def rewards(self) -> list[float]:
        found = [end.reward for end in self.ends if end.reward is not None]
        assert len(found) == len(self.ends), "a trajectory without a reward was trained"
        return found


class Evidence:
    def __init__(self, connection: Connection, run: str) -> None:
        self._rewarded = _by_place(connection, REWARDED)
        self.steps = {
            place: record
            for place, record in _by_place(connection, STEPS).items()
            if isinstance(record, Step)
        }
        ledger = records(connection, LEDGER)
        self._ledger = Ledger(run, ledger)  # raises if a group was trained twice
        self._decisions = [r for r in ledger if isinstance(r, Decision) and r.version is not None]
        self.policy = [r for r in records(connection, POLICY) if isinstance(r, PolicyVersion)]
        self.marks = PolicyMarks(run, self.policy)

    @cached_property
    def trained(self) -> list[Trained]:
        """Of every version, from the first on."""
        return [self._trained(decision) for decision in self._decisions]

    def _trained(self, decision: Decision) -> Trained:
        groups = [group for group in decision.groups if group.verdict == "train"]
        found = [
            self._rewarded[Position(partition=group.partition, offset=offset)]
            for group in groups
            for member in trained_members(group)
            for offset in member.offsets
        ]
        outcome = self._ledger.outcome(decision.sequence)
        assert decision.version is not None and outcome is not None
        return Trained(
            version=decision.version,
            steps=[record for record in found if isinstance(record, Step)],
            ends=[record for record in found if isinstance(record, TrajectoryEnd)],
            outcome=outcome,
        )

    @property
    def verdicts(self) -> dict[str, int]:
        """What became of all trajectories that were decided."""
        return dict(self._ledger.verdicts)

    @property
    def seconds(self) -> float:
        """From the first version that was live to the last."""
        live = [record.created_at for record in self.policy if record.phase == "live"]
        return (live[-1] - live[0]) / 1000


def _by_place(connection: Connection, topic: str) -> dict[Position, Record]:
    codec = connection.codec()
    return {
        Position(partition=message.partition, offset=message.offset): codec.decode(message.value)
        for message in messages(connection, topic)
    }
