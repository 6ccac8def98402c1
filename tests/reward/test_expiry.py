"""Trajectories whose time is up get an End that follows from them."""

from pool.core.progress import Received
from pool.core.trajectories import TrajectoryAssembler
from reward.worker.expiry import expired_id, overdue
from schemas import Position, Record
from tests.pool.records import end, step

NOW = 1_000_000


def assembled(*records: Record) -> TrajectoryAssembler:
    assembler = TrajectoryAssembler()
    for at, record in enumerate(records):
        assembler.feed(Received(record, 2, at))
    return assembler


def test_only_what_is_open_and_late_is_ended() -> None:
    assembler = assembled(
        step("a", trajectory="late", deadline=NOW - 1),
        step("b", trajectory="in-time", deadline=NOW + 1),
        step("c", trajectory="without"),
        step("d", trajectory="ended", deadline=NOW - 1),
        end(trajectory="ended", steps=1),
    )
    assert [found.trajectory_uid for found, *_ in overdue(assembler, NOW)] == ["late"]


def test_the_last_steps_deadline_holds() -> None:
    assembler = assembled(
        step("a", trajectory="t", deadline=NOW - 5),
        step("b", trajectory="t", deadline=NOW + 5),
    )
    assert not list(overdue(assembler, NOW))


def test_two_owners_write_the_same_end() -> None:
    assembler = assembled(step("a", trajectory="t", deadline=NOW - 1))
    ((first, closed, _),) = overdue(assembler, NOW)
    ((again, *_),) = overdue(assembler, NOW + 1000)
    assert first.end_id == again.end_id == expired_id("t")
    assert (first.status, first.steps) == ("expired", 1)
    assert (closed.status, closed.begins) == ("expired", Position(partition=2, offset=0))
