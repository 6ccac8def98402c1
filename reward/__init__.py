"""Rewards: consumers that annotate trajectories into the second topic, and functions that score them.

A reward function sees a whole trajectory and says what it is worth:

    def reward(trajectory):
        return 1.0 if trajectory.text.strip() == trajectory.metadata["answer"] else 0.0
"""

from reward.verdict import Reward, RewardFailed, RewardUnavailable
from reward.view import StepView, TrajectoryView

__all__ = ["Reward", "RewardFailed", "RewardUnavailable", "StepView", "TrajectoryView"]
