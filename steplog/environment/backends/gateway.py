"""The client of a gateway: opens, registers and completes trajectories.

An agent gets an ordinary OpenAI client whose base URL names its trajectory, so all of its calls are
recorded there. This client does the rest. Its requests may be repeated, so a response that is lost
with a gateway does no harm: naming a trajectory writes nothing, and registering or completing one
again with the same values changes nothing.

When a gateway has enough groups in flight it answers 429, and the client waits. It also waits for a
gateway that is down, up to a limit.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2

from steplog.environment.backends.backend import Ending, OpenTrajectory, TrajectoryRegistration
from steplog.environment.backends.connections import Connections
from steplog.environment.backends.recording import Json, describe_transport_error
from steplog.environment.errors import GatewayLost, GatewayRefused

SHORTEST_PAUSE = 0.25
LONGEST_PAUSE = 5.0
LONGEST_RETRY_AFTER = 60.0


class Client:
    """Trajectories of a gateway. Use it with `async with`, or close it."""

    def __init__(
        self,
        gateway: str = "http://127.0.0.1:8100",
        api_key: str | None = None,
        *,
        patience_s: float = 300.0,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway.rstrip("/")
        self._patience_s = patience_s
        self._clock = clock
        self._connections = Connections(self._gateway, api_key, timeout_s)
        self._http = self._connections.control_client(
            {"authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self.description = f"the gateway at {self._gateway}"
        self._wait_reason = ""

    @property
    def wait_reason(self) -> str:
        return self._wait_reason or self._connections.outage

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self.close()

    async def open(
        self,
        prompt_uid: str,
        *,
        group_size: int | None = None,
        channel: str = "train",
        deadline_s: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> OpenTrajectory:
        """Register a new trajectory. Trajectories with the same prompt_uid form a group."""
        trajectory = await self.name_trajectory(prompt_uid)
        registration = TrajectoryRegistration(channel, group_size, deadline_s, metadata or {})
        await self.register(trajectory.base_url, registration)
        return trajectory

    async def ready(self) -> None:
        """Returns when the gateway can answer calls."""
        try:
            await self._request("GET", f"{self._gateway}/ready")
        except GatewayRefused as refused:
            raise GatewayRefused(
                refused.status,
                f"{self._gateway} is not a gateway: /ready answered {refused.status}. Give the "
                "gateway's address without a path, such as http://HOST:8100.",
            ) from refused

    async def version(self) -> int | None:
        """The version of the weights that all engines have. None: no trainer has sent any yet, or the
        gateway does not answer."""
        response, _ = await self._request_once("GET", f"{self._gateway}/policy", None)
        if response is None or response.status_code != 200:
            return None
        version: int | None = response.json()["version"]
        return version

    async def name_trajectory(self, prompt_uid: str) -> OpenTrajectory:
        """Get a base URL, signed if the gateway has keys. Nothing is written to the log yet."""
        response = await self._request("POST", f"{self._gateway}/init_trajectory")
        # The prompt's part of the path is left to the client.
        segment = response.json()["base_url"].rsplit("/", 3)[1]
        base_url = f"{self._gateway}/{segment}/{quote(prompt_uid, safe='')}/v1"
        return self._connections.trajectory(base_url, prompt_uid)

    async def register(self, base_url: str, registration: TrajectoryRegistration) -> float:
        """Waits until the trajectory is admitted; returns the seconds that it had to wait."""
        began = self._clock()
        refusals: list[float] = []
        await self._request(
            "POST", f"{base_url}/register_trajectory", registration.body(), refusals
        )
        return self._clock() - began if refusals else 0.0

    async def complete(self, base_url: str, ending: Ending) -> None:
        await self._request("POST", f"{base_url}/complete_trajectory", ending.body())

    async def rate(self, base_url: str, answer_id: str, reward: float) -> None:
        """Give a reward to one Step: the one whose answer has this id."""
        body = {"reward": reward, "step_id": answer_id}
        await self._request("POST", f"{base_url}/feedback", body)

    async def close(self) -> None:
        await self._http.aclose()

    async def _request(
        self, method: str, url: str, body: Json | None = None, refusals: list[float] | None = None
    ) -> httpx2.Response:
        """Retry until there is an answer. The pause of every 429 is appended to `refusals`."""
        lost_at: float | None = None
        pause = SHORTEST_PAUSE
        try:
            while True:
                response, reason = await self._request_once(method, url, body)
                if response is None:
                    lost_at = self._clock() if lost_at is None else lost_at
                    self._check_patience(lost_at, reason)
                    pause = min(LONGEST_PAUSE, 2 * pause)
                elif response.status_code == 429:
                    lost_at, pause = None, _retry_after(response)
                    if refusals is not None:
                        refusals.append(pause)
                else:
                    return response
                self._wait_reason = reason
                await asyncio.sleep(pause)
        finally:
            self._wait_reason = ""

    async def _request_once(
        self, method: str, url: str, body: Json | None
    ) -> tuple[httpx2.Response | None, str]:
        """The response, or None if the gateway is unavailable; and the reason to wait, if any."""
        try:
            response = await self._http.request(method, url, json=body)
        except httpx2.TransportError as error:
            return None, describe_transport_error(error)
        if response.status_code < 400:
            return response, ""
        reason = _message(response)
        if response.status_code >= 500:
            return None, reason
        if response.status_code != 429:
            raise GatewayRefused(response.status_code, f"The gateway refused a request: {reason}")
        return response, reason

    def _check_patience(self, lost_at: float, reason: str) -> None:
        if self._clock() - lost_at > self._patience_s:
            raise GatewayLost(
                f"No answer from {self.description} for {self._patience_s:g} s: {reason}"
            )


def _message(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"


def _retry_after(response: httpx2.Response) -> float:
    try:
        seconds = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return LONGEST_PAUSE
    return min(LONGEST_RETRY_AFTER, max(SHORTEST_PAUSE, seconds))
