"""The outcome of a trajectory in a run, from the run's Decisions and the trajectory's records.

A Decision that names the trajectory has its verdict and reason. If none does, the trajectory waits, and
offsets show for what: for a reward worker, for the trainer to read it, or for the rest of its group; or
the trainer skipped it unread because it was too old.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from pool.core.ledger import WITHDRAWN
from pool.core.progress import Received
from pool.core.scored_groups import posted_group_uid
from schemas import DecidedGroup, Decision, Member, TrajectoryEnd
from schemas.records import Verdict


class Mention(NamedTuple):
    """A Decision that names the trajectory; `group` is None if it names it outside of any group."""

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


class TrajectoryOutcome(NamedTuple):
    """What a run did with the trajectory. The fields are keys of the command's JSON output."""

    run: str
    verdict: Verdict | Literal["waiting", "passed_over"]
    reason: str
    decision: int | None = None
    version: int | None = None
    """The version that it helped to train."""
    group: list[str] | None = None
    """The trajectories that it was compared with, including itself."""

    def sentence(self) -> str:
        prefix = f"run {self.run}: "
        if self.verdict == "train":
            size = len(self.group or ())
            return (
                f"{prefix}trained version {self.version}, in a group of {size} "
                f"(Decision {self.decision})"
            )
        if self.decision is None:
            return f"{prefix}{self.verdict.replace('_', ' ')}: {self.reason}"
        return f"{prefix}not trained, {self.verdict}: {self.reason} (Decision {self.decision})"


def find_mentions(decisions: Iterable[Decision], uid: str) -> list[Mention]:
    """The mentions of a trajectory, or of every trajectory of a posted group."""
    return [mention for decision in decisions for mention in _mentions_in(decision, uid)]


def _mentions_in(decision: Decision, uid: str) -> Iterator[Mention]:
    for group in decision.groups:
        for member in group.members:
            if uid in (member.trajectory_uid, posted_group_uid(member.trajectory_uid)):
                yield Mention(decision, group, member)
    for member in decision.others:
        if uid in (member.trajectory_uid, posted_group_uid(member.trajectory_uid)):
            yield Mention(decision, None, member)


def find_outcomes(
    run: str, decisions: Sequence[Decision], uid: str, copies: Sequence[Received]
) -> list[TrajectoryOutcome]:
    """`decisions` are those of the run; `copies` are the trajectory's records in the topic that the run
    trains from."""
    decided = [_decided(mention) for mention in find_mentions(decisions, uid)]
    if any(outcome.verdict in WITHDRAWN for outcome in decided):
        # An earlier Decision chose it for training, and a later one withdrew it.
        decided = [outcome for outcome in decided if outcome.verdict != "train"]
    return decided or [_undecided(run, decisions, copies)]


def _decided(mention: Mention) -> TrajectoryOutcome:
    decision, group, member = mention
    if group is None or member.verdict != "train":
        return TrajectoryOutcome(decision.run, member.verdict, member.reason, decision.sequence)
    trained = [other.trajectory_uid for other in group.members if other.verdict == "train"]
    return TrajectoryOutcome(
        decision.run,
        group.verdict,
        group.reason,
        decision.sequence,
        decision.version if group.verdict == "train" else None,
        trained,
    )


def _undecided(
    run: str, decisions: Sequence[Decision], copies: Sequence[Received]
) -> TrajectoryOutcome:
    if not decisions:
        return TrajectoryOutcome(run, "waiting", "the run has made no Decision yet")
    topic = decisions[-1].topic
    ends = [copy for copy in copies if isinstance(copy.record, TrajectoryEnd)]
    if not ends:
        return TrajectoryOutcome(
            run, "waiting", f"it has not ended, or is not scored yet: {topic} has no End"
        )
    partition, offset = ends[0].partition, ends[0].offset
    for skipped in (s for decision in decisions for s in decision.skipped):
        if skipped.partition == partition and skipped.first <= offset < skipped.end:
            reason = (
                f"its End is at offset {offset} of partition {partition}, and the trainer skipped "
                f"{skipped.first} to {skipped.end} unread: too old, or deleted"
            )
            return TrajectoryOutcome(run, "passed_over", reason)
    committed = _committed(decisions, partition)
    if committed <= offset:
        reason = (
            f"the last Decision had read partition {partition} up to offset {committed}, and its End "
            f"is at {offset}"
        )
        return TrajectoryOutcome(run, "waiting", reason)
    return TrajectoryOutcome(
        run, "waiting", "the trainer has read it, but not decided its group yet"
    )


def _committed(decisions: Sequence[Decision], partition: int) -> int:
    offsets = (o for decision in decisions for o in decision.offsets if o.partition == partition)
    return max((o.committed for o in offsets), default=0)
