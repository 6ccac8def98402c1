"""Groups of any size, without content."""

from gateway.atropos.state.queue import QueuedGroup, queued_group
from schemas import Position, ScoredGroup


def group(sequence: int, size: int, env_id: int | None = None) -> QueuedGroup:
    record = ScoredGroup(
        group_uid=f"g-{sequence}",
        prompt_uid=f"p-{sequence}",
        run="default",
        sequence=sequence,
        env_id=env_id,
        tokens=[b""] * size,
        masks=[b""] * size,
        scores=[0.0] * size,
    )
    return queued_group(record, Position(partition=sequence % 3, offset=sequence // 3))
