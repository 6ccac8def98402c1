"""Overlong shaping: lowers the reward of trajectories close to the largest allowed length."""

from trainer.algorithm.settings import LossSettings


def shape_reward(settings: LossSettings, reward: float, generated: int) -> float:
    """The reward of a trajectory with that many generated tokens."""
    longest, buffer = settings.overlong_max, settings.overlong_buffer
    if longest is None or buffer is None:
        return reward
    weight = 1.0 if settings.overlong_lambda is None else settings.overlong_lambda
    return reward + min(0.0, -weight * (generated - (longest - buffer)) / buffer)
