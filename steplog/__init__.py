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
    "Rollout",
    "TryAgain",
    "evaluate",
    "process",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'steplog' has no attribute {name!r}")
    return getattr(import_module("steplog.environment"), name)
