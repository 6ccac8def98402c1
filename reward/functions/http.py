"""Questions to a server: one session for each event loop, and what its errors mean.

What says something of the server makes the trajectory wait: no connection, no or a wrong key, no
such model, too many requests, errors of its own. Any other refusal is about the question. How long
an answer may take is the caller's business.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from reward.api import RewardFailed, RewardUnavailable

CONNECT_TIMEOUT = 5.0
KEEP_ALIVE = 4
"""Seconds. vLLM closes idle connections after five; a question must not meet one that is closing."""
ABOUT_THE_SERVER = {401, 403, 404, 408, 425, 429}
SHOWN = 300

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


async def ask(url: str, question: Any, headers: Mapping[str, str]) -> Any:
    """Posts JSON and gives the JSON that is answered."""
    body = msgspec.json.encode(question)
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
        raise RewardFailed(f"{url} did not answer with JSON: {answer[:SHOWN]!r}") from None


def _error(url: str, status: int, answer: bytes) -> RewardFailed | RewardUnavailable:
    of_server = status in ABOUT_THE_SERVER or status >= 500
    kind = RewardUnavailable if of_server else RewardFailed
    return kind(f"{url} answered {status}: {answer[:SHOWN].decode(errors='replace')}")


def with_key(api_key_env: str) -> dict[str, str]:
    """The header for a key that stands in the environment, so that no command line shows it."""
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
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
    return session


async def close() -> None:
    """Closes the session of the running loop."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()
