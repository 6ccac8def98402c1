"""The state of deciding, for those who watch."""

from pool.core.trajectories import step_of
from servicekit.metrics import set_lag
from trainer import metrics
from trainer.incarnation import Incarnation
from trainer.life import now_ms


def show_state(life: Incarnation) -> None:
    """What waits, and how far reading has come."""
    groups = [g for assembler in life.assemblers.values() for g in assembler.open_groups()]
    births = [
        step_of(received).created_at
        for group in groups
        for member in group.members.values()
        for received in member.steps[:1]
    ]
    metrics.open_groups.set(len(groups))
    metrics.oldest_open_group.set((now_ms() - min(births)) / 1000 if births else 0)
    for at in life.consumer.offsets():
        metrics.rebuild_offset.labels(str(at.partition)).set(max(at.rebuild, 0))
    set_lag(life.group, life.topic_name(life.topic), life.consumer.lags())
