"""Reports what is known about a trajectory: as lines for people, or as a JSON document."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pool.core.progress import Received
from pool.core.rewards import feedback_of, given_rewards
from pool.core.scored_groups import UNKNOWN_WEIGHTS
from pool.core.trajectories import StrayRecord, Trajectory, TrajectoryAssembler
from pool.core.versions import Version
from pool.topics import STEPS
from replay.lineage.outcomes import TrajectoryOutcome
from replay.lineage.search import LoggedTrajectory
from schemas import Feedback, Segment, Step
from schemas.packing import ID_BYTES
from schemas.plain import to_plain


@dataclass(frozen=True, slots=True)
class LineageReport:
    logged: LoggedTrajectory
    outcomes: list[TrajectoryOutcome]

    def document(self) -> dict[str, Any]:
        return {
            "trajectory_uid": self.logged.uid,
            **self._overview(),
            "records": {
                topic: {"partition": records[0].partition, "offsets": _offsets(records)}
                for topic, records in self._by_topic()
            },
            "rewards": {
                topic: _rewards(records) for topic, records in self._by_topic() if topic != STEPS
            },
            "fates": [outcome._asdict() for outcome in self.outcomes],
        }

    def lines(self) -> Iterator[str]:
        overview = self._overview()
        yield f"trajectory {self.logged.uid}: {_format_overview(overview)}"
        if overview["steps"]:
            versions = ", ".join(f"{name} ({n})" for name, n in overview["sampled_by"].items())
            yield f"  {overview['steps']} Steps, tokens by version: {versions or 'unknown'}"
        if overview["problem"]:
            yield f"  invalid: {overview['problem']}"
        for topic, records in self._by_topic():
            offsets = ", ".join(map(str, _offsets(records)))
            reward = "" if topic == STEPS else _format_reward(_rewards(records))
            yield f"  {topic}: partition {records[0].partition}, offsets {offsets}{reward}"
        if not self._by_topic():
            yield "  no records: retention has deleted them"
        yield from (outcome.sentence() for outcome in self.outcomes)

    def _by_topic(self) -> list[tuple[str, list[Received]]]:
        by_topic = [(STEPS, self.logged.steps), *self.logged.rewarded.items()]
        return [(topic, records) for topic, records in by_topic if records]

    def _overview(self) -> dict[str, Any]:
        """From the records in `steps`; if retention has deleted them, from a copy with rewards."""
        received = next((records for _, records in self._by_topic()), [])
        ended = _assemble(received)[0]
        records: list[Any] = [*self.logged.registrations, *(each.record for each in received)]
        steps = [record for record in records if isinstance(record, Step)]
        registered = next((r.status for r in reversed(self.logged.registrations) if r.status), None)
        return {
            "prompt_uid": records[0].prompt_uid if records else None,
            "channel": records[0].channel if records else None,
            "runs": sorted({record.run for record in records}),
            "status": ended.status if ended is not None else registered,
            "reason": ended.end.reason if ended is not None else None,
            "problem": ended.problem if ended is not None else None,
            "steps": len({step.step_id for step in steps}),
            "sampled_by": _tokens_by_version(steps),
        }


def _offsets(records: Sequence[Received]) -> list[int]:
    """Without duplicates: the records of a posted group share one offset."""
    return list(dict.fromkeys(received.offset for received in records))


def _assemble(records: Sequence[Received]) -> tuple[Trajectory | None, list[Received]]:
    """The trajectory, if it has ended, and the Feedback after its End."""
    assembler, ended, late_feedback = TrajectoryAssembler(), None, []
    for received in records:
        item = assembler.feed(received)
        if isinstance(item, Trajectory):
            ended = ended or item
        elif isinstance(item, StrayRecord) and isinstance(received.record, Feedback):
            late_feedback.append(received)
    return ended, late_feedback


def _tokens_by_version(steps: Sequence[Step]) -> dict[str, int]:
    tokens: Counter[str] = Counter()
    for step in {step.step_id: step for step in steps}.values():
        ends = [*(segment.first_token for segment in step.segments[1:]), _response_length(step)]
        for segment, end in zip(step.segments, ends, strict=False):
            tokens[_version_name(segment)] += end - segment.first_token
    return dict(tokens)


def _response_length(step: Step) -> int:
    return len(step.response_ids) // ID_BYTES


def _version_name(segment: Segment) -> str:
    """`unknown` for posted groups: they do not say which weights sampled them."""
    is_known = segment not in UNKNOWN_WEIGHTS
    return str(Version(segment.incarnation, segment.version)) if is_known else "unknown"


def _rewards(records: Sequence[Received]) -> dict[str, Any]:
    """The reward with which the trajectory counts, and its components."""
    ended, late_feedback = _assemble(records)
    if ended is None:
        return {"reward": None, "expected": None, "rewards": [], "feedback": []}
    return {
        "reward": given_rewards(ended, late_feedback).counting,
        "expected": ended.end.reward_expected,
        "rewards": to_plain(ended.end)["rewards"],
        "feedback": [feedback_of(r).reward for r in (*ended.feedback, *late_feedback)],
    }


def _format_reward(rewards: dict[str, Any]) -> str:
    if rewards["reward"] is None:
        return ", its reward is pending" if rewards["expected"] else ", no reward"
    components = [
        f"{' '.join(filter(None, (reward['name'], reward['version'])))}: {reward['value']}"
        for reward in rewards["rewards"]
    ]
    details = f" ({', '.join(components)})" if components else ""
    return f", reward {rewards['reward']:g}{details}"


def _format_overview(overview: dict[str, Any]) -> str:
    if overview["prompt_uid"] is None:
        return "only the ledger names it"
    reason = f" ({overview['reason']})" if overview["reason"] else ""
    status = f"{overview['status'] or 'not ended'}{reason}"
    runs = ", ".join(overview["runs"])
    return f"{status}, prompt {overview['prompt_uid']}, channel {overview['channel']}, run {runs}"
