"""What can go wrong with an environment.

    EnvironmentFailed         it must stop; one sentence for a person
    ├── GatewayLost           the gateway was away for longer than we have patience
    └── GatewayRefused        it will not take what we send, now or later
    TryAgain                  raised by authors: this rollout met an outage, and may be tried again

Whatever else a rollout raises fails that rollout and nothing besides.
"""


class EnvironmentFailed(Exception):
    """The environment cannot go on; the message is one sentence for a person."""


class GatewayLost(EnvironmentFailed):
    pass


class GatewayRefused(EnvironmentFailed):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TryAgain(Exception):
    """Something that a rollout needs is away for the moment; it begins again, as a new trajectory."""
