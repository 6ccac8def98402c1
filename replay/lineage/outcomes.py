"""What became of a trajectory in a run, from the run's Decisions and the trajectory's records.

A Decision that names it says so in its own words. If none does, it waits, and offsets tell for what:
a reward worker, its turn, the rest of its group; or the trainer passed over it, too old to be read.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from pool.core.progress import Received
from pool.core.scored_groups import posted_group_uid
from schemas import DecidedGroup, Decision, Member, TrajectoryEnd
from schemas.records import Verdict


class Naming(NamedTuple):
    """A Decision that names the trajectory; `group` is None where it stands outside of groups."""

    decision: Decision
    group: DecidedGroup | None
    member: Member

    @property
    def topic(self) -> str:
        return self.decision.topic

    @property
    def prompt_uid(self) -> str | None:
        return self.group.prompt_uid if self.group is not None else None

    @property
    def offsets(self) -> list[int]:
        return self.member.offsets


class Fate(NamedTuple):
    run: str
    verdict: Verdict | Literal["waiting", "passed_over"]
    reason: str
    decision: int | None = None
    version: int | None = None
    """That it helped to train."""
    group: list[str] | None = None
    """The trajectories that it was compared with, itself among them."""

    def sentence(self) -> str:
        where = f"run {self.run}: "
        if self.verdict == "train":
            mates = f"in a group of {len(self.group or ())}"
            return f"{where}trained version {self.version}, {mates} (Decision {self.decision})"
        if self.decision is None:
            return f"{where}{self.verdict.replace('_', ' ')}: {self.reason}"
        return f"{where}not trained, {self.verdict}: {self.reason} (Decision {self.decision})"


def namings(decisions: Iterable[Decision], uid: str) -> list[Naming]:
    """Of a trajectory, or of every trajectory of a posted group."""
    return [naming for decision in decisions for naming in _namings(decision, uid)]


def _namings(decision: Decision, uid: str) -> Iterator[Naming]:
    for group in decision.groups:
        for member in group.members:
            if uid in (member.trajectory_uid, posted_group_uid(member.trajectory_uid)):
                yield Naming(decision, group, member)
    for member in decision.others:
        if uid in (member.trajectory_uid, posted_group_uid(member.trajectory_uid)):
            yield Naming(decision, None, member)


def fates(
    run: str, decisions: Sequence[Decision], uid: str, copies: Sequence[Received]
) -> list[Fate]:
    """`decisions`: those of the run; `copies`: the trajectory's records in the topic that the run is
    trained from."""
    named = [_decided(naming) for naming in namings(decisions, uid)]
    if any(fate.verdict == "lost" for fate in named):
        # It was to be trained, and then was not.
        named = [fate for fate in named if fate.verdict != "train"]
    return named or [_undecided(run, decisions, copies)]


def _decided(naming: Naming) -> Fate:
    decision, group, member = naming
    if group is None or member.verdict != "train":
        return Fate(decision.run, member.verdict, member.reason, decision.sequence)
    trained = [other.trajectory_uid for other in group.members if other.verdict == "train"]
    return Fate(
        decision.run,
        group.verdict,
        group.reason,
        decision.sequence,
        decision.version if group.verdict == "train" else None,
        trained,
    )


def _undecided(run: str, decisions: Sequence[Decision], copies: Sequence[Received]) -> Fate:
    if not decisions:
        return Fate(run, "waiting", "the run has decided nothing yet")
    topic = decisions[-1].topic
    ends = [one for one in copies if isinstance(one.record, TrajectoryEnd)]
    if not ends:
        return Fate(run, "waiting", f"it has not ended, or is not yet rewarded: {topic} has no End")
    partition, offset = ends[0].partition, ends[0].offset
    for skipped in (s for decision in decisions for s in decision.skipped):
        if skipped.partition == partition and skipped.first <= offset < skipped.end:
            reason = (
                f"it ends at {offset} of partition {partition}, and the trainer passed over "
                f"{skipped.first} to {skipped.end} unread: too old, or deleted"
            )
            return Fate(run, "passed_over", reason)
    committed = _committed(decisions, partition)
    if committed <= offset:
        read = f"the last Decision had read partition {partition} up to {committed}"
        return Fate(run, "waiting", f"{read}, and it ends at {offset}")
    return Fate(run, "waiting", "it was read, and its group is not decided")


def _committed(decisions: Sequence[Decision], partition: int) -> int:
    offsets = (o for decision in decisions for o in decision.offsets if o.partition == partition)
    return max((o.committed for o in offsets), default=0)
