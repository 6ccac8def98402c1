"""The errors of environments.

    EnvironmentFailed         the environment must stop; the message is one sentence for a person
    ├── GatewayLost           the gateway was unavailable for longer than `patience_s`
    └── GatewayRefused        the gateway rejects a request, and would reject it again
    TryAgain                  raised by authors: this rollout met an outage and may be tried again

Anything else that a rollout raises fails that rollout only.
"""


class EnvironmentFailed(Exception):
    """The environment cannot continue; the message is one sentence for a person."""


class GatewayLost(EnvironmentFailed):
    pass


class GatewayRefused(EnvironmentFailed):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TryAgain(Exception):
    """Raise it in a rollout when something it needs is down. The rollout starts over as a new
    trajectory."""
