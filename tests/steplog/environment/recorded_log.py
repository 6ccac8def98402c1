"""What an environment's groups look like in the log."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pool.connection import Connection
from pool.topics import STEPS
from schemas import Feedback, Record, Step, TrajectoryEnd
from tests.pool.log import records


@dataclass
class RecordedTrajectory:
    """A trajectory, as the log has it."""

    steps: list[Step] = field(default_factory=list)
    ends: list[TrajectoryEnd] = field(default_factory=list)
    feedback: list[Feedback] = field(default_factory=list)

    @property
    def end(self) -> TrajectoryEnd:
        (end,) = self.ends
        return end


class RecordedLog:
    """Trajectories of `steps`, by uid and by prompt; all of them, or those of some prompts."""

    def __init__(self, connection: Connection, prompts: Collection[str] | None = None) -> None:
        self.trajectories: defaultdict[str, RecordedTrajectory] = defaultdict(RecordedTrajectory)
        for record in records(connection, STEPS):
            if prompts is None or getattr(record, "prompt_uid", "") in prompts:
                self._add(record)

    def _add(self, record: Record) -> None:
        match record:
            case Step():
                self.trajectories[record.trajectory_uid].steps.append(record)
            case TrajectoryEnd():
                self.trajectories[record.trajectory_uid].ends.append(record)
            case Feedback():
                self.trajectories[record.trajectory_uid].feedback.append(record)

    def groups(self, channel: str = "train") -> dict[str, list[RecordedTrajectory]]:
        """Ended trajectories of a channel, by prompt_uid."""
        groups: defaultdict[str, list[RecordedTrajectory]] = defaultdict(list)
        for trajectory in self.trajectories.values():
            if trajectory.ends and trajectory.end.channel == channel:
                groups[trajectory.end.prompt_uid].append(trajectory)
        return dict(groups)

    def complete_groups(
        self, size: int, channel: str = "train"
    ) -> dict[str, list[RecordedTrajectory]]:
        """Groups in which something was completed; each must have `size` members, neither more nor
        less."""
        groups = {
            prompt: members
            for prompt, members in self.groups(channel).items()
            if any(trajectory.end.status in ("completed", "truncated") for trajectory in members)
        }
        assert {len(members) for members in groups.values()} <= {size}, groups.keys()
        return groups


def statuses(members: Iterable[RecordedTrajectory]) -> list[str]:
    return sorted(trajectory.end.status for trajectory in members)


def numbers(prompts: Iterable[str]) -> list[int]:
    """The items' numbers, which prompt_uids carry."""
    return sorted(int(prompt.split(".")[0].split("-")[-2]) for prompt in prompts)


def lines(file: Path) -> list[dict[str, Any]]:
    """Without the one that is being written."""
    complete, _, _ = file.read_text().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def prompts(file: Path) -> list[str]:
    """The prompt_uids of the groups that an environment kept in a file."""
    return [line["prompt_uid"] for line in lines(file)]
