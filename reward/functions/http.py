"""HTTP requests of judges and reward models: one session per event loop, and what errors mean.

An error of the server makes the trajectory wait: no connection, a missing or wrong key, no such model,
too many requests, a 5xx status. Any other status is a failure of this request. The caller sets the
timeout.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from steplog.rewards import RewardFailed, RewardUnavailable

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 4
"""vLLM closes idle connections after 5 s; a request must not be sent on one that is closing."""
SERVER_STATUSES = {401, 403, 404, 408, 425, 429}
MAX_SHOWN = 300
"""Characters of an answer in an error message."""

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


async def post_json(url: str, request: Any, headers: Mapping[str, str]) -> Any:
    """Posts JSON and returns the decoded JSON of the answer."""
    body = msgspec.json.encode(request)
    headers = {"Content-Type": "application/json", **headers}
    try:
        async with _session().post(url, data=body, headers=headers) as response:
            answer = await response.read()
    except aiohttp.ClientError as error:
        raise RewardUnavailable(f"{url}: {error or type(error).__name__}") from error
    if response.status != 200:
        raise _error(url, response.status, answer)
    try:
        return msgspec.json.decode(answer)
    except msgspec.DecodeError:
        raise RewardFailed(f"{url} did not answer with JSON: {answer[:MAX_SHOWN]!r}") from None


def _error(url: str, status: int, answer: bytes) -> RewardFailed | RewardUnavailable:
    is_server_error = status in SERVER_STATUSES or status >= 500
    kind = RewardUnavailable if is_server_error else RewardFailed
    return kind(f"{url} answered {status}: {answer[:MAX_SHOWN].decode(errors='replace')}")


def key_headers(api_key_env: str) -> dict[str, str]:
    """The headers for a key from an environment variable, so that no command line shows it."""
    if not api_key_env:
        return {}
    if not os.environ.get(api_key_env):
        raise ValueError(f"the environment variable {api_key_env} is not set")
    return {"Authorization": f"Bearer {os.environ[api_key_env]}"}


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        session = _sessions[loop] = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
    return session


async def close() -> None:
    """Closes the session of the running loop."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()
