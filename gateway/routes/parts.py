"""The running parts of the gateway that routes use, and whether they are ready."""

import time

from gateway.calls.call import CallContext
from gateway.calls.generation import Generator
from gateway.calls.submission import Submission
from gateway.calls.unbound_calls import UnboundCalls
from gateway.engines.policy import Policy
from gateway.engines.router import EngineRouter
from gateway.errors import Unavailable
from gateway.http.exchange import Exchange
from gateway.http.keys import Keys, api_key
from gateway.settings import GatewaySettings
from gateway.state.log import StepsLog
from gateway.state.trajectories import Trajectories

DEFAULT_UNBOUND_CHANNEL = "unbound"
"""Channel of recorded calls that name no trajectory."""


class GatewayParts:
    """Everything that is running when the gateway is ready."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: Keys,
        log: StepsLog,
        trajectories: Trajectories,
        generator: Generator,
        policy: Policy,
    ) -> None:
        self.settings = settings
        self.keys = keys
        self.log = log
        self.trajectories = trajectories
        self.generator = generator
        self.policy = policy
        self.submission = Submission(log, trajectories, policy)
        self.call_context = CallContext(generator, log, trajectories, settings.max_prompt_tokens)
        self.unbound_calls = UnboundCalls(
            self.call_context, settings.unbound_channel or DEFAULT_UNBOUND_CHANNEL
        )

    @property
    def engines(self) -> EngineRouter:
        return self.generator.engines

    def unready_reasons(self) -> list[str]:
        """Why calls cannot be served now; empty if they can."""
        reasons = ["Kafka is not acknowledging records"] if self.log.is_stalled() else []
        if not self.engines.usable():
            reasons.append("no engine is usable")
        return reasons

    def tenant(self, exchange: Exchange) -> str:
        """The tenant of the request's API key; refuses an unknown key."""
        return self.keys.tenant(api_key(exchange))

    def check_caller(self, exchange: Exchange) -> None:
        """Refuses a caller with neither a signed base URL nor a key."""
        if "trajectory_uid" in exchange.scope["path_params"]:
            self.keys.verify(exchange.uid("trajectory_uid"))
        else:
            self.tenant(exchange)

    def path_ids(self, exchange: Exchange) -> tuple[str, str, str]:
        """trajectory_uid, tenant and scoped prompt_uid of a base URL."""
        uid, tenant = self.keys.verify(exchange.uid("trajectory_uid"))
        return uid, tenant, prompt_scope(tenant) + exchange.uid("prompt_uid")


class GatewayState:
    """What routes share. `parts` is None until all of them run; `starting_reason` says why."""

    def __init__(self, settings: GatewaySettings, keys: Keys) -> None:
        self.settings = settings
        self.keys = keys
        self.parts: GatewayParts | None = None
        self.starting_reason = "it is starting"
        self._created = time.monotonic()

    def require_parts(self) -> GatewayParts:
        if self.parts is None:
            raise Unavailable(
                f"The gateway is not ready yet: {self.starting_reason}. Retry later.",
                wait_s=time.monotonic() - self._created,
            )
        return self.parts


def prompt_scope(tenant: str) -> str:
    """Prefix of a tenant's prompt_uids, so that nobody can join another tenant's groups."""
    return f"{tenant}/" if tenant else ""
