"""Rewards: reward functions, and the workers that read `steps`, score with them and write `rewarded`.

A reward function gets a whole trajectory and returns what it is worth:

    from steplog import Trajectory

    def reward(trajectory: Trajectory) -> float:
        return 1.0 if trajectory.text.strip() == trajectory.metadata["answer"] else 0.0

The classes that reward functions use (Trajectory, TrajectoryStep, Reward, RewardFailed,
RewardUnavailable) are defined in `steplog/rewards.py`; users import them from `steplog`.
"""
