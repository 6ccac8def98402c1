"""Answers that reached no client: what the log is told of them."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from gateway.calls.call import LlmCall
from gateway.dialects.request import Request
from gateway.state.admission import Admission
from gateway.state.completion import Completion
from gateway.state.conversation import HashChain
from gateway.state.registrar import TrajectoryRules
from gateway.state.trajectories import Trajectories
from gateway.state.trajectory import RecordedStep, TrajectoryState
from schemas import Position, Record, Registration, Step, StepNote, TrajectoryEnd
from tests.pool.records import step

ASKED = b"request"
RULES = TrajectoryRules(
    run="run", gateway="g", group_size=1, deadline_s=60, max_open_trajectories=9
)


class Log:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[Record] = []

    async def write(self, record: Record) -> Position:
        self.written.append(record)
        return Position(partition=0, offset=len(self.written))

    async def register(self, _: Registration) -> Position:
        return Position(partition=0, offset=0)


class Unwritten:
    """A call whose Step was not acknowledged."""

    task: "asyncio.Task[Any]"
    request_hash = ASKED
    listeners = 0

    def __init__(self, step_id: str) -> None:
        self.unwritten_step: Step | None = step(step_id, request_hash=ASKED)


def open_trajectory() -> TrajectoryState:
    begins = Position(partition=0, offset=0)
    return TrajectoryState(
        Registration(trajectory_uid="t", prompt_uid="p", run="run", begins=begins)
    )


async def test_a_client_that_leaves_later_does_not_undo_that_another_got_the_answer() -> None:
    log = Log()
    request = Request(messages=[])
    context = cast(Any, SimpleNamespace(log=log))
    call = LlmCall(context, open_trajectory(), request, HashChain(request), ASKED, 0)
    call.recorded = RecordedStep(step("a"), 1)
    await call.mark_delivered()
    await call.mark_undelivered()
    assert log.written == []


async def test_the_end_comes_after_a_note_on_each_step_that_may_be_in_the_log() -> None:
    """Its client got an error, but only the acknowledgement may have been lost."""
    log = Log()
    admission = Admission("run", None, 1, 1.0)
    trajectories = Trajectories(cast(Any, log), cast(Any, None), admission, RULES)
    trajectories.registrar.follower = cast(Any, SimpleNamespace(note_own=lambda _: True))
    trajectory = open_trajectory()
    trajectory.add(step("a"), b"")
    trajectory.keep_unfinished(Unwritten("lost"))
    await trajectories.complete(trajectory, Completion())
    noted, end = log.written
    assert isinstance(noted, StepNote) and isinstance(end, TrajectoryEnd)
    assert (noted.step_id, noted.delivered, end.steps) == ("lost", False, 1)


async def test_an_equal_request_takes_up_a_step_that_could_not_be_written() -> None:
    trajectory, lost = open_trajectory(), Unwritten("lost")
    trajectory.keep_unfinished(lost)
    trajectory.add(step("another vote", request_hash=ASKED), b"")
    assert trajectory.pop_unwritten(b"another request") is None
    assert trajectory.pop_unwritten(ASKED) is lost
    assert trajectory.pop_unwritten(ASKED) is None


async def test_a_step_that_was_written_at_last_is_delivered_to_its_retry() -> None:
    trajectory = open_trajectory()
    trajectory.keep_unfinished(Unwritten("lost"))
    trajectory.add(step("lost", request_hash=ASKED), b"")
    assert trajectory.unwritten_steps() == []


async def test_an_equal_request_does_not_take_up_a_call_that_was_not_generated() -> None:
    """It is a vote like any other."""
    trajectory, failed = open_trajectory(), Unwritten("x")
    failed.unwritten_step = None
    trajectory.keep_unfinished(failed)
    assert trajectory.pop_unwritten(ASKED) is None
    assert trajectory.pop_unfinished(ASKED) is failed
