"""Short ways to write a log down. What a test does not name has a value that does not matter."""

from collections.abc import Iterable, Sequence
from typing import Any, overload

from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group, GroupRules, UngroupedTrajectory
from pool.core.progress import Assembler, Received
from pool.core.prompts import encode_prompt
from pool.core.trajectories import StrayRecord, Trajectory, TrajectoryAssembler, annotate
from schemas import Feedback, Position, Record, Segment, Step, StepNote, TrajectoryEnd
from schemas.packing import pack_ids, pack_logprobs

RUN = "run"
FAR = 10**15
"""A time at which every deadline has passed."""


def step(
    step_id: str,
    trajectory: str = "t",
    prompt: str = "p",
    *,
    index: int = 0,
    ids: Sequence[int] = (1, 2, 3),
    response: Sequence[int] = (4, 5),
    version: int = 0,
    **fields: Any,
) -> Step:
    """A Step that stores its whole prompt."""
    return Step(
        step_id=step_id,
        trajectory_uid=trajectory,
        prompt_uid=prompt,
        step_index=index,
        prompt_ids=pack_ids(ids),
        response_ids=pack_ids(response),
        response_logprobs=pack_logprobs([-0.5] * len(response)),
        **{"run": RUN, "segments": [sampled(version)], **fields},
    )


def sampled(version: int, first_token: int = 0) -> Segment:
    return Segment(incarnation=1, version=version, first_token=first_token)


def child(step_id: str, parent: Step, context: Sequence[int], added: Sequence[int]) -> Step:
    """A Step whose prompt is a delta: `context` is the parent's prompt and response."""
    stored = encode_prompt(pack_ids([*context, *added]), {parent.step_id: pack_ids(context)})
    assert stored.parent is not None, "the context is too short to be worth sharing"
    return Step(
        step_id=step_id,
        trajectory_uid=parent.trajectory_uid,
        prompt_uid=parent.prompt_uid,
        step_index=parent.step_index + 1,
        run=RUN,
        **stored._asdict(),
        response_ids=pack_ids([8, 9]),
        response_logprobs=pack_logprobs([-0.5, -0.5]),
    )


def end(
    trajectory: str = "t", prompt: str = "p", *, steps: int = 1, **fields: Any
) -> TrajectoryEnd:
    return TrajectoryEnd(
        trajectory_uid=trajectory,
        prompt_uid=prompt,
        steps=steps,
        **{"end_id": f"end-{trajectory}", "run": RUN, "status": "completed", **fields},
    )


def feedback(
    reward: float, trajectory: str = "t", prompt: str = "p", *, id: str = "", **fields: Any
) -> Feedback:
    return Feedback(
        feedback_id=id or f"feedback-{trajectory}-{reward}",
        trajectory_uid=trajectory,
        prompt_uid=prompt,
        reward=reward,
        **{"run": RUN, **fields},
    )


def note(step_id: str, delivered: bool, trajectory: str = "t", *, id: str = "") -> StepNote:
    return StepNote(
        note_id=id or f"note-{step_id}-{delivered}",
        step_id=step_id,
        trajectory_uid=trajectory,
        prompt_uid="p",
        run=RUN,
        delivered=delivered,
    )


def run_of(
    trajectory: str, prompt: str = "p", reward: float | None = 1.0, **fields: Any
) -> tuple[Step, TrajectoryEnd]:
    """A whole trajectory of one Step; the fields are those of its End."""
    only = step(f"{trajectory}-0", trajectory, prompt)
    return only, end(trajectory, prompt, reward=reward, **fields)


def log(*records: Record, first: int = 0, partition: int = 0) -> list[Received]:
    """Records at consecutive offsets."""
    return [Received(record, partition, first + n) for n, record in enumerate(records)]


def at(offset: int, record: Record, partition: int = 0) -> Received:
    return Received(record, partition, offset)


def copied(offset: int, record: Record, source: int, partition: int = 0) -> Received:
    """A record of `rewarded` that was copied from offset `source` of `steps`."""
    return at(offset, annotate(record, Position(partition=partition, offset=source)), partition)


@overload
def feed(
    assembler: TrajectoryAssembler, received: Iterable[Received]
) -> list[Trajectory | StrayRecord]: ...
@overload
def feed(
    assembler: GroupAssembler, received: Iterable[Received]
) -> list[Group | UngroupedTrajectory | StrayRecord]: ...
def feed(assembler: Assembler[Any], received: Iterable[Received]) -> list[Any]:
    """The items that the records complete, in order."""
    items = (assembler.feed(one) for one in received)
    return [item for item in items if item is not None]


def trajectory_of(*records: Record, first: int = 0, partition: int = 0) -> Trajectory:
    """The one trajectory that the records make."""
    [item] = feed(TrajectoryAssembler(), log(*records, first=first, partition=partition))
    assert isinstance(item, Trajectory)
    return item


def group_of(*records: Record, size: int = 2) -> Group:
    """The one group that the records make; it is closed."""
    [item] = feed(GroupAssembler(GroupRules(group_size=size)), log(*records))
    assert isinstance(item, Group)
    return item


def view(item: object) -> object:
    """All that can be seen of an item, to compare."""
    if isinstance(item, Trajectory):
        return (
            item.end,
            list(item.records),
            [received.offset for received in item.steps],
            [received.offset for received in item.feedback],
            item.undelivered,
            item.orphans,
            item.problem,
        )
    if isinstance(item, UngroupedTrajectory):
        return view(item.trajectory), item.verdict, item.reason
    return item
