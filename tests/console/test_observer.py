"""Successive snapshots: the second continues where the first stopped reading."""

import asyncio
from typing import Any

import pytest

from console.observer import open_observer
from console.snapshot import RunBacklog
from pool import topics
from pool.connection import Connection
from pool.topics import LEDGER, TRAJECTORIES
from schemas import DecidedGroup, Decision, Member, Position, Record, Registration
from tests.pool.log import write
from tests.trainer.agents import RUN

pytestmark = pytest.mark.broker


def registration(uid: str, **fields: Any) -> Registration:
    begins = Position(partition=0, offset=0)
    return Registration(
        trajectory_uid=uid, prompt_uid="p", run=RUN, begins=begins, group_size=2, **fields
    )


def decision(*uids: str) -> Decision:
    group = DecidedGroup(
        prompt_uid="p",
        partition=0,
        first_offset=0,
        closed_at=9,
        verdict="train",
        members=[Member(trajectory_uid=uid, verdict="train") for uid in uids],
    )
    return Decision(run=RUN, incarnation=1, sequence=1, groups=[group])


async def observe(
    connection: Connection, *rounds: tuple[str, list[Record]]
) -> list[list[RunBacklog]]:
    """One after each round of writing, by one observer."""
    found = []
    async with open_observer(connection) as observer:
        for topic, records in rounds:
            await asyncio.to_thread(write, connection, topic, records)
            found.append((await observer.observe()).runs)
    return found


async def test_each_snapshot_continues_where_the_last_one_stopped(connection: Connection) -> None:
    await asyncio.to_thread(topics.create, connection, 1)
    begun, ended, decided = await observe(
        connection,
        (TRAJECTORIES, [registration("a"), registration("b")]),
        (TRAJECTORIES, [registration(uid, status="completed") for uid in "ab"]),
        (LEDGER, [decision("a", "b")]),
    )
    assert (begun[0].open_trajectories, begun[0].groups_running) == (2, 1)
    assert (ended[0].open_trajectories, ended[0].groups_waiting) == (0, 1)
    assert decided == []


async def test_a_first_snapshot_finds_decisions_about_what_it_has_read(
    connection: Connection,
) -> None:
    await asyncio.to_thread(topics.create, connection, 1)
    ended: list[Record] = [registration(uid, status="completed") for uid in "ab"]
    await asyncio.to_thread(write, connection, TRAJECTORIES, ended)
    (found,) = await observe(connection, (LEDGER, [decision("a", "b")]))
    assert found == []
