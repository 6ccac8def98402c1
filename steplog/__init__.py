"""The public names: everything that users import comes from here, as in `from steplog import
Environment`.

Names are loaded when they are first used, because the `steplog` command lives in this package too and
should start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steplog.environment import (
        Agent,
        Client,
        Ending,
        Environment,
        EnvironmentFailed,
        EnvironmentSettings,
        EvaluationResult,
        GatewayLost,
        GatewayRefused,
        Group,
        OpenTrajectory,
        Rollout,
        TryAgain,
        evaluate,
        process,
        serve,
    )
    from steplog.rewards import Reward, RewardFailed, RewardUnavailable, Trajectory, TrajectoryStep

__all__ = [
    "Agent",
    "Client",
    "Ending",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentSettings",
    "EvaluationResult",
    "GatewayLost",
    "GatewayRefused",
    "Group",
    "OpenTrajectory",
    "Reward",
    "RewardFailed",
    "RewardUnavailable",
    "Rollout",
    "Trajectory",
    "TrajectoryStep",
    "TryAgain",
    "evaluate",
    "process",
    "serve",
]
REWARD_NAMES = ("Reward", "RewardFailed", "RewardUnavailable", "Trajectory", "TrajectoryStep")
"""For reward functions; all other names are for environments and agents."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'steplog' has no attribute {name!r}")
    module = "steplog.rewards" if name in REWARD_NAMES else "steplog.environment"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
