"""The gateway, as whoever runs agents sees it: trajectories that are opened, led and completed.

An agent gets an ordinary OpenAI client whose base URL names its trajectory; everything that it says is
recorded there. This client does the rest. Both ways of writing may be repeated, so an answer that is
lost with a gateway costs nothing: naming a trajectory writes nothing, and to register or complete it
again with the same words changes nothing.

A gateway that has enough groups says 429, and we wait. One that is away is waited for as well, up to a
limit.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
from openai import AsyncOpenAI

from steplog.environment.errors import GatewayLost, GatewayRefused
from steplog.environment.recording import Call, Json, Recorder, no_answer

Status = Literal["completed", "truncated", "failed", "cancelled"]

CONNECT_S = 5.0
CONTROL_S = 60.0
"""Seconds for a request that generates nothing."""
SHORTEST_PAUSE = 0.25
LONGEST_PAUSE = 5.0
RETRIES = 10
"""Of a call, by OpenAI's client, which marks them: a gateway that restarts within a minute goes on
with the same trajectory, and gives an answer again that it had already recorded."""
LONGEST_REASON = 2000


class Ending(NamedTuple):
    """What a TrajectoryEnd says. `channel` only where it leaves the channel that it began in."""

    status: Status = "completed"
    reward: float | None = None
    reason: str | None = None
    channel: str | None = None

    def body(self) -> Json:
        given = self._asdict() | {"reason": self.reason and self.reason[:LONGEST_REASON]}
        return {name: value for name, value in given.items() if value is not None}


class About(NamedTuple):
    """What a trajectory is registered with."""

    channel: str = "train"
    group_size: int | None = None
    deadline_s: float | None = None
    metadata: Mapping[str, Any] = {}

    def body(self) -> Json:
        given = self._asdict() | {"metadata": dict(self.metadata)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class Trajectory:
    """A name in the log, and the client that speaks under it."""

    base_url: str
    prompt_uid: str
    client: AsyncOpenAI
    calls: list[Call] = field(default_factory=list)
    """What was said."""


class Backend(Protocol):
    """Where rollouts find their model."""

    where: str
    """The words for it."""

    @property
    def waits_for(self) -> str:
        """Why a request of ours waits at the moment; nothing: none does."""

    async def ready(self) -> None: ...

    async def name(self, prompt_uid: str) -> Trajectory: ...

    async def register(self, base_url: str, about: About) -> float: ...

    async def complete(self, base_url: str, ending: Ending) -> None: ...

    async def rate(self, base_url: str, answer_id: str, reward: float) -> None: ...

    async def close(self) -> None: ...


class Connections:
    """Shared by the OpenAI clients of all trajectories, each of which is overheard on its own."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        self.transport = httpx2.AsyncHTTPTransport(limits=limits, proxy=_proxy(url))
        self._api_key = api_key or "none"
        self._timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        self.trouble = ""
        """Why a call of an agent is repeated at the moment."""

    def meet(self, trouble: str) -> str:
        self.trouble = trouble
        return trouble

    def trajectory(self, base_url: str, prompt_uid: str) -> Trajectory:
        calls: list[Call] = []
        http = httpx2.AsyncClient(
            transport=Recorder(self.transport, calls.append, self.meet),
            trust_env=False,
            timeout=self._timeout,
        )
        client = AsyncOpenAI(
            base_url=base_url,
            api_key=self._api_key,
            http_client=http,
            max_retries=RETRIES,
            timeout=self._timeout,
        )
        return Trajectory(base_url, prompt_uid, client, calls)


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    found = getproxies().get(parts.scheme)
    return None if found is None or proxy_bypass(parts.hostname or "") else found


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
        self._http = httpx2.AsyncClient(
            transport=self._connections.transport,
            trust_env=False,
            timeout=httpx2.Timeout(CONTROL_S, connect=CONNECT_S),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        )
        self.where = f"the gateway at {self._gateway}"
        self._waits_for = ""

    @property
    def waits_for(self) -> str:
        return self._waits_for or self._connections.trouble

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
    ) -> Trajectory:
        """A trajectory that is registered. Those of one prompt_uid form a group."""
        trajectory = await self.name(prompt_uid)
        about = About(channel, group_size, deadline_s, metadata or {})
        await self.register(trajectory.base_url, about)
        return trajectory

    async def ready(self) -> None:
        """Returns when the gateway can answer calls."""
        try:
            await self._ask("GET", f"{self._gateway}/ready")
        except GatewayRefused as refused:
            raise GatewayRefused(
                refused.status,
                f"{self._gateway} is no gateway: /ready has {refused.status}; "
                "give its address without a path, as http://HOST:8100",
            ) from refused

    async def version(self) -> int | None:
        """Of the weights that all engines have. None: no trainer has given any, or nobody answers."""
        reply, _ = await self._attempt("GET", f"{self._gateway}/policy", None)
        if reply is None or reply.status_code != 200:
            return None
        found: int | None = reply.json()["version"]
        return found

    async def name(self, prompt_uid: str) -> Trajectory:
        """A base URL, signed where the gateway has keys. Nothing is written."""
        reply = await self._ask("POST", f"{self._gateway}/init_trajectory")
        # The prompt's place in the path is the client's to fill.
        segment = reply.json()["base_url"].rsplit("/", 3)[1]
        base_url = f"{self._gateway}/{segment}/{quote(prompt_uid, safe='')}/v1"
        return self._connections.trajectory(base_url, prompt_uid)

    async def register(self, base_url: str, about: About) -> float:
        """Returns when it is admitted, and says for how many seconds it was not."""
        began = self._clock()
        refusals: list[float] = []
        await self._ask("POST", f"{base_url}/register_trajectory", about.body(), refusals)
        return self._clock() - began if refusals else 0.0

    async def complete(self, base_url: str, ending: Ending) -> None:
        await self._ask("POST", f"{base_url}/complete_trajectory", ending.body())

    async def rate(self, base_url: str, answer_id: str, reward: float) -> None:
        """A reward for one Step: that of the answer with this id."""
        await self._ask("POST", f"{base_url}/feedback", {"reward": reward, "step_id": answer_id})

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(
        self, method: str, url: str, body: Json | None = None, refusals: list[float] | None = None
    ) -> httpx2.Response:
        """Asks until there is an answer; `refusals` get the pauses that a 429 asked for."""
        lost_at: float | None = None
        pause = SHORTEST_PAUSE
        try:
            while True:
                reply, trouble = await self._attempt(method, url, body)
                if reply is None:
                    lost_at = self._clock() if lost_at is None else lost_at
                    self._check_patience(lost_at, trouble)
                    pause = min(LONGEST_PAUSE, 2 * pause)
                elif reply.status_code == 429:
                    lost_at, pause = None, _retry_after(reply)
                    if refusals is not None:
                        refusals.append(pause)
                else:
                    return reply
                self._waits_for = trouble
                await asyncio.sleep(pause)
        finally:
            self._waits_for = ""

    async def _attempt(
        self, method: str, url: str, body: Json | None
    ) -> tuple[httpx2.Response | None, str]:
        """The answer, or none with the words for why not."""
        try:
            reply = await self._http.request(method, url, json=body)
        except httpx2.TransportError as error:
            return None, no_answer(error)
        if reply.status_code < 400:
            return reply, ""
        trouble = _message(reply)
        if reply.status_code >= 500:
            return None, trouble
        if reply.status_code != 429:
            raise GatewayRefused(reply.status_code, f"the gateway refuses: {trouble}")
        return reply, trouble

    def _check_patience(self, lost_at: float, trouble: str) -> None:
        if self._clock() - lost_at > self._patience_s:
            raise GatewayLost(f"{self.where} was not usable for {self._patience_s:g} s: {trouble}")


def _message(reply: httpx2.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {reply.status_code}"


def _retry_after(reply: httpx2.Response) -> float:
    try:
        return min(60.0, max(SHORTEST_PAUSE, float(reply.headers["retry-after"])))
    except (KeyError, ValueError):
        return LONGEST_PAUSE


class Direct:
    """Any OpenAI-style URL: a Backend that records nothing."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float, patience_s: float) -> None:
        self._url = self.where = url
        self._patience_s = patience_s
        self._connections = Connections(url, api_key, timeout_s)
        self._http = httpx2.AsyncClient(
            transport=self._connections.transport,
            trust_env=False,
            timeout=httpx2.Timeout(CONTROL_S, connect=CONNECT_S),
        )

    @property
    def waits_for(self) -> str:
        return self._connections.trouble

    async def ready(self) -> None:
        """Returns when there is an answer, whatever it says: not everyone has a list of models."""
        began, pause = time.monotonic(), SHORTEST_PAUSE
        while self._connections.meet(await self._knock()):
            if time.monotonic() - began > self._patience_s:
                raise GatewayLost(
                    f"{self.where} was not usable for {self._patience_s:g} s: {self.waits_for}"
                )
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def _knock(self) -> str:
        try:
            await self._http.get(f"{self._url}/models")
        except httpx2.TransportError as error:
            return no_answer(error)
        return ""

    async def name(self, prompt_uid: str) -> Trajectory:
        return self._connections.trajectory(self._url, prompt_uid)

    async def register(self, base_url: str, about: About) -> float:  # noqa: ARG002
        return 0.0

    async def complete(self, base_url: str, ending: Ending) -> None:
        pass

    async def rate(self, base_url: str, answer_id: str, reward: float) -> None:
        pass

    async def close(self) -> None:
        await self._http.aclose()
