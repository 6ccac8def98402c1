"""Any OpenAI-style server as a backend. Nothing is recorded in a log."""

import asyncio
import time

import httpx2

from steplog.environment.backends.backend import Ending, OpenTrajectory, TrajectoryRegistration
from steplog.environment.backends.connections import Connections
from steplog.environment.backends.gateway import LONGEST_PAUSE, SHORTEST_PAUSE
from steplog.environment.backends.recording import describe_transport_error
from steplog.environment.errors import GatewayLost


class Direct:
    def __init__(self, url: str, api_key: str | None, timeout_s: float, patience_s: float) -> None:
        self._url = self.description = url
        self._patience_s = patience_s
        self._connections = Connections(url, api_key, timeout_s)
        self._http = self._connections.control_client()

    @property
    def wait_reason(self) -> str:
        return self._connections.outage

    async def ready(self) -> None:
        """Returns when the server answers, with any status: not every server lists its models."""
        began, pause = time.monotonic(), SHORTEST_PAUSE
        while self._connections.note_outage(await self._find_outage()):
            if time.monotonic() - began > self._patience_s:
                raise GatewayLost(
                    f"No answer from {self.description} for {self._patience_s:g} s: "
                    f"{self.wait_reason}"
                )
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def _find_outage(self) -> str:
        try:
            await self._http.get(f"{self._url}/models")
        except httpx2.TransportError as error:
            return describe_transport_error(error)
        return ""

    async def name_trajectory(self, prompt_uid: str) -> OpenTrajectory:
        return self._connections.trajectory(self._url, prompt_uid)

    async def register(self, base_url: str, registration: TrajectoryRegistration) -> float:  # noqa: ARG002
        return 0.0

    async def complete(self, base_url: str, ending: Ending) -> None:
        pass

    async def rate(self, base_url: str, answer_id: str, reward: float) -> None:
        pass

    async def close(self) -> None:
        await self._http.aclose()
