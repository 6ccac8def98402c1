"""Steps to complete trajectories.

Rules, each tested by name:

* Steps are the same only if their step_ids are equal; copies are folded into the first. So are copies
  of a note or of Feedback: an old copy never undoes a newer record.
* A trajectory closes at its first TrajectoryEnd by offset. Later Steps, notes and Ends are late.
* It is complete when it has at least as many distinct step_ids as its End counts: the process that
  closed it knows every Step acknowledged through itself; another may have acknowledged more before.
* Missing Steps, a missing parent or a different prefix make it invalid, with the reason; it still
  closes, so that nothing waits for it.
* An answer that was delivered is a sample, however often its request is repeated. One that was not
  delivered, by the last note on it, is an orphan (readable, not trained) unless a later Step extends
  it. Of equal answers, that Step extends the delivered one, else the last.
* Overflow is truncation: if its last call was refused because the prompt did not fit into the model's
  context, the trajectory is truncated, whether its agent then completed it, failed, or never came back.
* Feedback belongs to the open trajectory, or is a stray record; it is never late here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

import msgspec

from pool.core.progress import Received
from pool.core.prompts import BrokenPrompt, full_prompts
from schemas import Feedback, Position, Record, ScoredGroup, Step, StepNote, TrajectoryEnd
from schemas.records import Status, Verdict

MEMORY = 2_000
"""Offsets of its partition for which a closed trajectory is remembered. Gateways refuse calls on a
closed trajectory, so late records result from races of seconds; every restart reads this many offsets
again."""


ENDS_OF_OVERFLOWS: tuple[Status, ...] = ("completed", "failed", "expired")
"""How agents end trajectories that overflowed the context. One that was cancelled stays cancelled."""


class StrayReason(Enum):
    """Why a record belongs to no open trajectory or group."""

    TRAJECTORY_ENDED = auto()
    TRAJECTORY_NOT_OPEN = auto()
    """It needs earlier Steps, and none of its trajectory is remembered."""
    GROUP_NOT_OPEN = auto()
    """Feedback on a group that is decided, or that never was."""
    NO_SCORES = auto()
    """A posted group without a scored sequence."""
    OTHER_CHANNEL = auto()


@dataclass(frozen=True, slots=True)
class StrayRecord:
    """A record outside of any open trajectory: it is late, or Feedback on a closed one."""

    received: Received
    verdict: Verdict | None = None
    reason: StrayReason | None = None

    @property
    def first_offset(self) -> int:
        return self.received.offset


@dataclass(frozen=True)
class Trajectory:
    """A closed trajectory. `steps` are distinct and ordered by step_index, ties by offset."""

    steps: Sequence[Received]
    end: TrajectoryEnd
    feedback: Sequence[Received]
    undelivered: frozenset[str]
    records: Sequence[Received]
    """All of its records as they were read; the End is last."""

    @property
    def uid(self) -> str:
        return self.end.trajectory_uid

    @property
    def prompt_uid(self) -> str:
        return self.end.prompt_uid

    @property
    def status(self) -> Status:
        """How it ended. An End that a reward worker wrote to `rewarded` says it all."""
        is_final = self.end.source is not None
        return self.end.status if is_final else status_of(self.end, self.overflowed)

    @property
    def trace(self) -> str:
        """The traceparent of its End."""
        return self.records[-1].trace

    @property
    def first_offset(self) -> int:
        return self.records[0].offset

    @property
    def group_size(self) -> int | None:
        """The group size that the trajectory states, in its End or else in a Step."""
        sizes = [self.end.group_size, *(step_of(received).group_size for received in self.steps)]
        return next((size for size in sizes if size is not None), None)

    @cached_property
    def advantages(self) -> dict[str, bytes]:
        """The advantages that the environment gave, by step_id: packed float32, one for every id of the
        response or a single one for all of them. Other Steps have the advantage of their group."""
        return {given.step_id: given.values for given in self.end.advantages}

    @property
    def is_scored(self) -> bool:
        """Whether it came through the Atropos API; the weights that sampled it are not known then."""
        return isinstance(self.records[0].record, ScoredGroup)

    @property
    def began(self) -> Position:
        """Position of its first record in `steps`."""
        return min(source_position(received) for received in self.records)

    @property
    def ended(self) -> Position:
        return source_position(self.records[-1])

    @cached_property
    def prompts(self) -> dict[str, bytes]:
        """The full packed prompt of every Step, by step_id."""
        by_offset = sorted(self.steps, key=source_position)
        return full_prompts(step_of(received) for received in by_offset)

    @cached_property
    def problem(self) -> str | None:
        """Why the trajectory is invalid; None if it is valid."""
        if len(self.steps) < self.end.steps:
            return f"its End counts {self.end.steps} Steps, and {len(self.steps)} are in the log"
        try:
            if any(step_of(received).parent is not None for received in self.steps):
                _ = self.prompts
        except BrokenPrompt as broken:
            return str(broken)
        return None

    @cached_property
    def overflowed(self) -> bool:
        """Whether its last call was refused because its prompt did not fit into the context."""
        notes = [r for r in self.records if isinstance(r.record, StepNote) and r.record.overflowed]
        latest_step = max(map(source_position, self.steps), default=None)
        return latest_step is not None and any(source_position(r) > latest_step for r in notes)

    @cached_property
    def orphans(self) -> frozenset[str]:
        """step_ids of the answers that were not delivered and that no later Step extends."""
        lost = self.undelivered.intersection(step_of(received).step_id for received in self.steps)
        return lost - self._extended_answers() if lost and self.problem is None else lost

    def _extended_answers(self) -> set[str]:
        """step_ids of the undelivered answers that a later Step extends."""
        steps = [step_of(received) for received in sorted(self.steps, key=source_position)]
        contexts = {step.step_id: self.prompts[step.step_id] + step.response_ids for step in steps}
        delivered = {context for uid, context in contexts.items() if uid not in self.undelivered}
        extended: dict[bytes, str] = {}
        for at, step in enumerate(steps):
            context = contexts[step.step_id]
            later = (self.prompts[other.step_id] for other in steps[at + 1 :])
            if context not in delivered and any(_extends(prompt, context) for prompt in later):
                extended[context] = step.step_id  # of equal answers, the last
        return set(extended.values())


@dataclass(slots=True)
class _OpenTrajectory:
    records: list[Received]
    steps: dict[str, Received] = field(default_factory=dict)
    notes: dict[str, StepNote] = field(default_factory=dict)
    feedback: dict[str, Received] = field(default_factory=dict)

    def close(self, end: TrajectoryEnd) -> Trajectory:
        steps = sorted(
            self.steps.values(),
            key=lambda received: (step_of(received).step_index, source_position(received)),
        )
        delivered = {note.step_id: note.delivered for note in self.notes.values()}
        return Trajectory(
            steps=steps,
            end=end,
            feedback=list(self.feedback.values()),
            undelivered=frozenset(uid for uid, was in delivered.items() if not was),
            records=self.records,
        )


class TrajectoryAssembler:
    """Open trajectories of one partition. Feed it the records of `steps` or of `rewarded`."""

    def __init__(self, memory: int = MEMORY) -> None:
        self.memory = memory
        self._open: dict[str, _OpenTrajectory] = {}
        self._closed: OrderedDict[str, int] = OrderedDict()

    def feed(self, received: Received) -> Trajectory | StrayRecord | None:
        record = received.record
        if isinstance(record, Step):
            return self._add_step(received, record)
        if isinstance(record, TrajectoryEnd):
            return self._add_end(received, record)
        if isinstance(record, StepNote):
            return self._add_note(received, record)
        if isinstance(record, Feedback):
            return self._add_feedback(received, record)
        return StrayRecord(received)

    def oldest_open(self) -> int | None:
        # Trajectories stand in the order in which their first record was read.
        return next((open_.records[0].offset for open_ in self._open.values()), None)

    def forget_before(self, offset: int) -> None:
        self._open = {u: o for u, o in self._open.items() if o.records[0].offset >= offset}

    def open_trajectories(self) -> Iterable[tuple[str, Sequence[Received]]]:
        """Trajectories that have not ended: uid and records, oldest first."""
        return ((uid, open_.records) for uid, open_ in self._open.items())

    def _add_step(self, received: Received, step: Step) -> StrayRecord | None:
        if self._is_closed(step.trajectory_uid, received.offset):
            return StrayRecord(received, "late", StrayReason.TRAJECTORY_ENDED)
        open_ = self._open.get(step.trajectory_uid)
        if open_ is None:
            if step.parent is not None:
                # Its parent lay before it, so the trajectory ended longer ago than we remember.
                return StrayRecord(received, "late", StrayReason.TRAJECTORY_NOT_OPEN)
            open_ = self._open[step.trajectory_uid] = _OpenTrajectory([])
        if step.step_id not in open_.steps:
            open_.steps[step.step_id] = received
            open_.records.append(received)
        return None

    def _add_end(self, received: Received, end: TrajectoryEnd) -> Trajectory | StrayRecord:
        was_closed = self._is_closed(end.trajectory_uid, received.offset)
        self._remember(end.trajectory_uid, received.offset)
        if was_closed:
            return StrayRecord(received, "late", StrayReason.TRAJECTORY_ENDED)
        open_ = self._open.pop(end.trajectory_uid, None)
        if open_ is None:
            if end.steps > 0:
                return StrayRecord(received, "late", StrayReason.TRAJECTORY_NOT_OPEN)
            open_ = _OpenTrajectory([])
        open_.records.append(received)
        return open_.close(end)

    def _add_note(self, received: Received, note: StepNote) -> StrayRecord | None:
        open_ = self._open.get(note.trajectory_uid)
        if open_ is None:
            return StrayRecord(received, "late", StrayReason.TRAJECTORY_NOT_OPEN)
        if note.note_id not in open_.notes:
            open_.notes[note.note_id] = note
            open_.records.append(received)
        return None

    def _add_feedback(self, received: Received, feedback: Feedback) -> StrayRecord | None:
        open_ = self._open.get(feedback.trajectory_uid)
        if open_ is None:
            return StrayRecord(received)
        if feedback.feedback_id not in open_.feedback:
            open_.feedback[feedback.feedback_id] = received
            open_.records.append(received)
        return None

    def _is_closed(self, uid: str, offset: int) -> bool:
        closed_at = self._closed.get(uid)
        return closed_at is not None and closed_at + self.memory >= offset

    def _remember(self, uid: str, offset: int) -> None:
        """Remembers a closed trajectory from its last End on. So what is remembered depends only on the
        last `memory` offsets, wherever reading began."""
        self._closed.pop(uid, None)
        self._closed[uid] = offset
        while next(iter(self._closed.values())) + self.memory < offset:
            self._closed.popitem(last=False)


def _extends(prompt: bytes, context: bytes) -> bool:
    """Whether a prompt goes on after a Step's prompt and response. An equal prompt does not: it is that
    of another answer to the same request."""
    return len(prompt) > len(context) and prompt.startswith(context)


def status_of(end: TrajectoryEnd, overflowed: bool) -> Status:
    """How a trajectory ended, by its End and whether its last call overflowed the context."""
    return "truncated" if overflowed and end.status in ENDS_OF_OVERFLOWS else end.status


def source_position(received: Received) -> Position:
    """The position of a record in `steps`, also if it was read from `rewarded`."""
    origin = getattr(received.record, "source", None)
    return origin or Position(partition=received.partition, offset=received.offset)


def step_of(received: Received) -> Step:
    assert isinstance(received.record, Step)
    return received.record


def annotate(record: Record, position: Position, **fields: object) -> Record:
    """The copy of a record for `rewarded`: with its position in `steps`, and the fields to add."""
    return msgspec.structs.replace(record, source=position, **fields)
