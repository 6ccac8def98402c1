"""Ends trajectories whose deadline has passed.

Time alone closes nothing. The owner of the partition writes a TrajectoryEnd whose id is derived from
the trajectory, and the trajectory closes when that record is read. So every rebuild sees the same, and
two owners in a row write the same End. Gateways learn of it from `trajectories`.
"""

import uuid
from collections.abc import Iterator, Sequence

from pool.core.progress import Received
from pool.core.trajectories import TrajectoryAssembler, source_position
from schemas import Registration, Step, TrajectoryEnd

EXPIRED_NAMESPACE = uuid.UUID("b3a7a2f0-7f8e-4a43-9d3c-3f4be0a5a6d1")


def expired_id(trajectory_uid: str) -> str:
    return str(uuid.uuid5(EXPIRED_NAMESPACE, trajectory_uid))


def overdue(
    assembler: TrajectoryAssembler, now_ms: int
) -> Iterator[tuple[TrajectoryEnd, Registration, str]]:
    """For each open trajectory past its deadline: its End, the registration that closes it, and the
    traceparent of its last record."""
    for _, records in assembler.open_trajectories():
        steps = [record for r in records if isinstance(record := r.record, Step)]
        if steps and steps[-1].deadline is not None and steps[-1].deadline < now_ms:
            yield _end(steps, now_ms), _closing(steps[-1], records, now_ms), records[-1].trace


def _end(steps: Sequence[Step], now_ms: int) -> TrajectoryEnd:
    last = steps[-1]
    return TrajectoryEnd(
        end_id=expired_id(last.trajectory_uid),
        trajectory_uid=last.trajectory_uid,
        prompt_uid=last.prompt_uid,
        run=last.run,
        channel=last.channel,
        status="expired",
        steps=len(steps),
        reason="its deadline passed",
        metadata=last.metadata,
        group_size=last.group_size,
        created_at=now_ms,
    )


def _closing(last: Step, records: Sequence[Received], now_ms: int) -> Registration:
    return Registration(
        trajectory_uid=last.trajectory_uid,
        prompt_uid=last.prompt_uid,
        run=last.run,
        channel=last.channel,
        metadata=last.metadata,
        group_size=last.group_size,
        deadline=last.deadline,
        tenant=last.tenant,
        begins=source_position(records[0]),
        status="expired",
        created_at=now_ms,
    )
