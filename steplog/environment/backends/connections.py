"""The HTTP connections that the OpenAI clients of all trajectories share."""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
from openai import AsyncOpenAI

from steplog.environment.backends.backend import OpenTrajectory
from steplog.environment.backends.recording import Recorder, Recording

CONNECT_S = 5.0
CONTROL_S = 60.0
"""Seconds for a request that generates nothing."""
RETRIES = 10
"""Retries of a call by OpenAI's client, which marks them as such. A gateway that restarts within a
minute continues the same trajectory, and repeats an answer that it had already recorded."""


class Connections:
    """One connection pool; each trajectory's client records its own calls."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        self.transport = httpx2.AsyncHTTPTransport(limits=limits, proxy=_proxy(url))
        self._api_key = api_key or "none"
        self._timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        self.outage = ""
        """Why a call of an agent is being retried at the moment; empty when none is."""

    def note_outage(self, reason: str) -> str:
        self.outage = reason
        return reason

    def control_client(self, headers: dict[str, str] | None = None) -> httpx2.AsyncClient:
        """A client for requests other than the agents' calls."""
        return httpx2.AsyncClient(
            transport=self.transport,
            trust_env=False,
            timeout=httpx2.Timeout(CONTROL_S, connect=CONNECT_S),
            headers=headers or {},
        )

    def trajectory(self, base_url: str, prompt_uid: str) -> OpenTrajectory:
        recording = Recording()
        http = httpx2.AsyncClient(
            transport=Recorder(self.transport, recording, self.note_outage),
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
        return OpenTrajectory(base_url, prompt_uid, client, recording)


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    return None if proxy is None or proxy_bypass(parts.hostname or "") else proxy
