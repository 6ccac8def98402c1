"""What is known of a trajectory, for people and for machines."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pool.core.groups import Group, feedback_of
from pool.core.progress import Received
from pool.core.scored_groups import UNKNOWN_WEIGHTS
from pool.core.trajectories import StrayRecord, Trajectory, TrajectoryAssembler
from pool.core.versions import Version
from pool.topics import STEPS
from replay.lineage.outcomes import Fate
from replay.lineage.search import Traces
from schemas import Feedback, Segment, Step
from schemas.packing import ID_BYTES
from schemas.plain import to_plain


@dataclass(frozen=True, slots=True)
class Lineage:
    traces: Traces
    fates: list[Fate]

    def document(self) -> dict[str, Any]:
        return {
            "trajectory_uid": self.traces.uid,
            **self._about(),
            "records": {
                topic: {"partition": found[0].partition, "offsets": _offsets(found)}
                for topic, found in self._places()
            },
            "rewards": {
                topic: _rewards(found) for topic, found in self._places() if topic != STEPS
            },
            "fates": [fate._asdict() for fate in self.fates],
        }

    def lines(self) -> Iterator[str]:
        about = self._about()
        yield f"trajectory {self.traces.uid}: {_words(about)}"
        if about["steps"]:
            versions = ", ".join(f"{name} ({n})" for name, n in about["sampled_by"].items())
            yield f"  {about['steps']} Steps, tokens by version: {versions or 'unknown'}"
        if about["problem"]:
            yield f"  invalid: {about['problem']}"
        for topic, found in self._places():
            offsets = ", ".join(map(str, _offsets(found)))
            told = "" if topic == STEPS else _reward_words(_rewards(found))
            yield f"  {topic}: partition {found[0].partition}, offsets {offsets}{told}"
        if not self._places():
            yield "  no records: the log has deleted them"
        yield from (fate.sentence() for fate in self.fates)

    def _places(self) -> list[tuple[str, list[Received]]]:
        places = [(STEPS, self.traces.steps), *self.traces.rewarded.items()]
        return [(topic, found) for topic, found in places if found]

    def _about(self) -> dict[str, Any]:
        """From `steps`; where these have expired, from a copy."""
        found = next((found for _, found in self._places()), [])
        closed = closing(found)[0]
        said: list[Any] = [*self.traces.registrations, *(one.record for one in found)]
        calls = [one.record for one in found if isinstance(one.record, Step)]
        registered = next((r.status for r in reversed(self.traces.registrations) if r.status), None)
        return {
            "prompt_uid": said[0].prompt_uid if said else None,
            "channel": said[0].channel if said else None,
            "runs": sorted({record.run for record in said}),
            "status": closed.end.status if closed is not None else registered,
            "reason": closed.end.reason if closed is not None else None,
            "problem": closed.problem if closed is not None else None,
            "steps": len({step.step_id for step in calls}),
            "sampled_by": _sampled_by(calls),
        }


def _offsets(found: Sequence[Received]) -> list[int]:
    """One record holds a whole group that was posted."""
    return list(dict.fromkeys(one.offset for one in found))


def closing(found: Sequence[Received]) -> tuple[Trajectory | None, list[Received]]:
    """The trajectory, if it has ended, and the Feedback that came afterwards."""
    assembler, closed, later = TrajectoryAssembler(), None, []
    for one in found:
        item = assembler.feed(one)
        if isinstance(item, Trajectory):
            closed = closed or item
        elif isinstance(item, StrayRecord) and isinstance(one.record, Feedback):
            later.append(one)
    return closed, later


def _sampled_by(steps: Sequence[Step]) -> dict[str, int]:
    """Tokens of each version."""
    found: Counter[str] = Counter()
    for step in {step.step_id: step for step in steps}.values():
        ends = [*(segment.first_token for segment in step.segments[1:]), _tokens(step)]
        for segment, end in zip(step.segments, ends, strict=False):
            found[_name(segment)] += end - segment.first_token
    return dict(found)


def _tokens(step: Step) -> int:
    return len(step.response_ids) // ID_BYTES


def _name(segment: Segment) -> str:
    """Who posts groups does not say which weights sampled them."""
    is_known = segment not in UNKNOWN_WEIGHTS
    return str(Version(segment.incarnation, segment.version)) if is_known else "unknown"


def _rewards(found: Sequence[Received]) -> dict[str, Any]:
    """What it counts with, and what that is made of."""
    closed, later = closing(found)
    if closed is None:
        return {"reward": None, "expected": None, "rewards": [], "feedback": []}
    group = Group(closed.prompt_uid, found[0].partition, 1, {closed.uid: closed}, later)
    return {
        "reward": group.reward(closed),
        "expected": closed.end.reward_expected,
        "rewards": to_plain(closed.end)["rewards"],
        "feedback": [feedback_of(one).reward for one in (*closed.feedback, *later)],
    }


def _reward_words(rewards: dict[str, Any]) -> str:
    if rewards["reward"] is None:
        return ", its reward is still to come" if rewards["expected"] else ", no reward"
    parts = [f"{one['name']} {one['version']}".strip() for one in rewards["rewards"]]
    values = [
        f"{name}: {one['value']}" for name, one in zip(parts, rewards["rewards"], strict=True)
    ]
    made_of = f" ({', '.join(values)})" if values else ""
    return f", reward {rewards['reward']:g}{made_of}"


def _words(about: dict[str, Any]) -> str:
    if about["prompt_uid"] is None:
        return "only the ledger names it"
    why = f" ({about['reason']})" if about["reason"] else ""
    status = f"{about['status'] or 'not ended'}{why}"
    runs = ", ".join(about["runs"])
    return f"{status}, prompt {about['prompt_uid']}, channel {about['channel']}, run {runs}"
