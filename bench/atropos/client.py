"""Requests to a server of the Atropos API, and the time that they take."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable
from typing import Any, NamedTuple

import aiohttp
import psutil

from tests.gateway.atropos.running import ENV, TRAINING

CLIENTS = 8
REQUEST_LIMIT_S = 60
"""A server that takes longer for a request is given up."""
VOCABULARY = 150_000
GZIP_MAGIC = b"\x1f\x8b"


class MeasuredServer(NamedTuple):
    """A server that is measured."""

    name: str
    url: str
    pid: int

    @property
    def cpu(self) -> float:
        """CPU seconds of the process and all its children."""
        root = psutil.Process(self.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))


class RequestCost(NamedTuple):
    seconds: float
    cpu: float
    requests: int = 1
    """Requests, or groups, that this was spent for."""


async def measure(server: MeasuredServer, work: Awaitable[Any], count: int = 1) -> RequestCost:
    cpu, began = server.cpu, time.perf_counter()
    await work
    return RequestCost(time.perf_counter() - began, server.cpu - cpu, count)


def group_body(size: int, tokens: int, env_id: int | None = None) -> bytes:
    rng = random.Random(size * tokens)
    ids = [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(size)]
    logprobs = [[round(-3 * rng.random(), 6) for _ in range(tokens)] for _ in range(size)]
    group = {"tokens": ids, "masks": ids, "scores": [1.0] * size, "inference_logprobs": logprobs}
    return json.dumps(group | {"env_id": env_id}).encode()


def list_body(group: bytes, count: int) -> bytes:
    return b"[" + b",".join([group] * count) + b"]"


class AtroposClient:
    """Keeps its connections between requests."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def wait_until_up(self, server: MeasuredServer) -> None:
        deadline = time.monotonic() + REQUEST_LIMIT_S
        while time.monotonic() < deadline:
            try:
                async with self._session.get(f"{server.url}/info"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
        raise SystemExit(f"{server.name} does not answer at {server.url}")

    async def post(self, server: MeasuredServer, path: str, body: bytes) -> Any:
        headers = {"content-type": "application/json"}
        if body.startswith(GZIP_MAGIC):
            headers["content-encoding"] = "gzip"
        async with self._session.post(server.url + path, data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def get(self, server: MeasuredServer, path: str, **options: Any) -> bytes:
        async with self._session.get(server.url + path, **options) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async def reset(
        self, server: MeasuredServer, batch_size: int, share: float | None = None
    ) -> None:
        """Forgets all groups; registers a trainer, and two environments with a minimum share."""
        await self.get(server, "/reset_data")
        training = json.dumps(TRAINING | {"batch_size": batch_size, "max_token_len": 4096})
        await self.post(server, "/register", training.encode())
        await self.get(server, "/batch")
        env = json.dumps(ENV | {"group_size": 8, "min_batch_allocation": share})
        for _ in range(2):
            await self.post(server, "/register-env", env.encode())

    async def post_many(
        self,
        server: MeasuredServer,
        body: bytes,
        count: int,
        path: str = "/scored_data",
        clients: int = CLIENTS,
    ) -> None:
        async def post_share(share: int) -> None:
            for _ in range(share):
                await self.post(server, path, body)

        await asyncio.gather(*(post_share(count // clients) for _ in range(clients)))
