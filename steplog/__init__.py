"""What a user imports: `from steplog import Environment`. It is loaded when it is asked for, since the
command, too, lives here and shall be quick."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steplog.environment import (
        Agent,
        Client,
        Ending,
        Environment,
        EnvironmentSettings,
        Group,
        Rollout,
        TryAgain,
    )

__all__ = [
    "Agent",
    "Client",
    "Ending",
    "Environment",
    "EnvironmentSettings",
    "Group",
    "Rollout",
    "TryAgain",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'steplog' has no attribute {name!r}")
    from steplog import environment

    return getattr(environment, name)
