"""Publishes the state of group assembly and reading as Prometheus gauges."""

from pool.core.trajectories import step_of
from servicekit.metrics import set_lag
from trainer import metrics
from trainer.incarnation.base import now_ms
from trainer.incarnation.live import LiveIncarnation


def update_gauges(incarnation: LiveIncarnation) -> None:
    """Open groups, the age of the oldest, rebuild offsets and lag."""
    assemblers = incarnation.assemblers.values()
    groups = [group for assembler in assemblers for group in assembler.open_groups()]
    first_steps = [
        step_of(received).created_at
        for group in groups
        for member in group.members.values()
        for received in member.steps[:1]
    ]
    metrics.open_groups.set(len(groups))
    oldest = (now_ms() - min(first_steps)) / 1000 if first_steps else 0
    metrics.oldest_open_group.set(oldest)
    for offsets in incarnation.consumer.offsets():
        metrics.rebuild_offset.labels(str(offsets.partition)).set(max(offsets.rebuild, 0))
    topic = incarnation.topic_name(incarnation.topic)
    set_lag(incarnation.group, topic, incarnation.consumer.lags())
