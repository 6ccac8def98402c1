"""The Atropos API beside Atropos' own server in the same run: posts, batches and polls.

Atropos' server is `run-api` of atroposlib, which the extra `peers` installs. Eight clients post over
persistent connections. What counts is the server's CPU time, since the machine is shared with the
clients. It may be shared with others, too, so both servers are measured in alternating rounds and the
best round of each counts.

Posts are measured a second time with CPUs that are kept awake: on a virtual machine, code runs slowly
for a while after a sleep, and only the server that waits for a broker sleeps.
"""

import asyncio
import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import aiohttp

from bench.atropos.client import (
    CLIENTS,
    REQUEST_LIMIT_S,
    AtroposClient,
    MeasuredServer,
    RequestCost,
    group_body,
    list_body,
    measure,
)
from pool import topics
from pool.connection import Connection
from tests.conftest import free_port
from tests.gateway.atropos.running import running_atropos

POSTS = {(4, 64): 2560, (8, 512): 400, (8, 2048): 96}
"""Posts per round by sequences and tokens of a group."""
ROUNDS = 5
WARM_UP_SHARE = 4
"""Each round is preceded by a fourth as many posts that are not measured."""
SINGLE_CLIENT_POSTS = 400
LIST_LENGTH = 16
"""Small groups in one post of a list."""
QUEUE_LENGTHS = (0, 1_000, 10_000)
POLLS = 100
NO_BATCHES = 1_000_000
"""A batch size that is never reached."""
IDLE_LOOP = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True: pass
"""


def run(connection: Connection) -> None:
    topics.create(connection)
    with running_atropos(connection) as steplog, _running_peer() as peer:
        asyncio.run(_compare([peer, MeasuredServer("steplog", steplog.url, steplog.process.pid)]))


@contextmanager
def _running_peer() -> Iterator[MeasuredServer]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("run-api")), "--port", str(port)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield MeasuredServer("atroposlib", f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.kill()  # it may be forming batches for minutes
            process.wait()


async def _compare(servers: list[MeasuredServer]) -> None:
    limit = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit) as session:
        bench = AtroposBench(AtroposClient(session), servers)
        await bench.wait_until_up()
        await bench.show_posts("")
        with _cpus_awake():
            await bench.show_posts(", CPUs kept awake")
        print("  target: half of the CPU time for groups of 512 tokens and more, else no more")
        await bench.show_other_posts()
        await bench.show_batches()
        for share in (None, 0.25):
            await bench.show_queue_lengths(share)


@contextmanager
def _cpus_awake() -> Iterator[None]:
    """Runs a process on every CPU that yields to all others but keeps the CPU from sleeping."""
    processes = [
        subprocess.Popen([sys.executable, "-c", IDLE_LOOP]) for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class AtroposBench:
    """Measures the servers with the same requests and prints their costs."""

    def __init__(self, client: AtroposClient, servers: list[MeasuredServer]) -> None:
        self._client = client
        self._servers = servers

    async def wait_until_up(self) -> None:
        for server in self._servers:
            await self._client.wait_until_up(server)

    async def show_posts(self, condition: str) -> None:
        print(f"\nPOST /scored_data, tokens + masks + logprobs, {CLIENTS} clients{condition}")
        for (size, tokens), count in POSTS.items():
            plain = group_body(size, tokens)
            for encoding, body in (("", plain), (" gzip", gzip.compress(plain, 6))):
                name = f"{size} x {tokens} tokens, {len(body) / 1000:.0f} kB{encoding}"
                await self._show(name, partial(self._post, body=body, count=count), ROUNDS)

    async def show_other_posts(self) -> None:
        print("\nOther ways to post")
        body = group_body(4, 64)
        single = partial(self._post, body=body, count=SINGLE_CLIENT_POSTS, clients=1)
        await self._show("4 x 64 tokens, one client", single, ROUNDS)
        name = f"one of {LIST_LENGTH} x (4 x 64) in a list"
        await self._show(name, self._post_lists, ROUNDS)

    async def show_batches(self) -> None:
        print("\nGET /batch, 64 sequences of 2,048 tokens, formed before")
        for encoding in ("identity", "gzip"):
            await self._show(encoding, partial(self._get_formed_batch, encoding=encoding))

    async def show_queue_lengths(self, share: float | None) -> None:
        print(f"\nBy queue length, groups of 8 x 64, minimum allocation {share}")
        for length in QUEUE_LENGTHS:
            for server in self._servers:
                await self._fill_queue(server, length, share)
            await self._show(f"poll, {length:,} groups queued", self._poll)
            await self._show(f"first /batch, {length:,} groups queued", self._get_first_batch)

    async def _show(
        self, name: str, work: Callable[[MeasuredServer], Awaitable[RequestCost]], rounds: int = 1
    ) -> None:
        costs = [[await work(server) for server in self._servers] for _ in range(rounds)]
        best = [_best(of_server) for of_server in zip(*costs, strict=True)]
        for server, cost in zip(self._servers, best, strict=True):
            cpu, wall = cost.cpu / cost.requests * 1e3, cost.seconds / cost.requests * 1e3
            print(f"  {name:<34} {server.name:<11} {cpu:>9.2f} ms CPU {wall:>10.2f} ms")
        peer, ours = best
        cpu_ratio, wall_ratio = peer.cpu / max(ours.cpu, 1e-3), peer.seconds / ours.seconds
        print(f"  {'':<34} {'ratio':<11} {cpu_ratio:>8.1f} ×     {wall_ratio:>10.1f} ×")

    async def _post(
        self, server: MeasuredServer, body: bytes, count: int, clients: int = CLIENTS
    ) -> RequestCost:
        client = self._client
        await client.reset(server, NO_BATCHES)
        await client.post_many(server, body, count // WARM_UP_SHARE, clients=clients)
        work = client.post_many(server, body, count, clients=clients)
        return await measure(server, work, count)

    async def _post_lists(self, server: MeasuredServer) -> RequestCost:
        groups = POSTS[4, 64]
        body, path = list_body(group_body(4, 64), LIST_LENGTH), "/scored_data_list"
        lists = groups // LIST_LENGTH
        await self._client.reset(server, NO_BATCHES)
        await self._client.post_many(server, body, lists // WARM_UP_SHARE, path)
        return await measure(server, self._client.post_many(server, body, lists, path), groups)

    async def _get_formed_batch(self, server: MeasuredServer, encoding: str) -> RequestCost:
        """Atropos forms two batches at once here; the second one is measured."""
        await self._client.reset(server, 64)
        await self._client.post_many(server, group_body(8, 2048), 16)
        headers = {"accept-encoding": encoding}
        await self._client.get(server, "/batch", headers=headers)
        return await measure(server, self._client.get(server, "/batch", headers=headers))

    async def _fill_queue(self, server: MeasuredServer, length: int, share: float | None) -> None:
        await self._client.reset(server, 64, share)
        for env_id in (0, 1):
            body = list_body(group_body(8, 64, env_id), 50)
            for _ in range(length // 100):
                await self._client.post(server, "/scored_data_list", body)

    async def _poll(self, server: MeasuredServer) -> RequestCost:
        async def poll() -> None:
            for _ in range(POLLS):
                await self._client.get(server, "/status-env", json={"env_id": 0})

        return await measure(server, poll(), POLLS)

    async def _get_first_batch(self, server: MeasuredServer) -> RequestCost:
        try:
            return await measure(server, self._client.get(server, "/batch"))
        except TimeoutError:
            print(f"  {server.name} did not answer /batch within {REQUEST_LIMIT_S} s")
            return RequestCost(REQUEST_LIMIT_S, REQUEST_LIMIT_S)


def _best(costs: Sequence[RequestCost]) -> RequestCost:
    return RequestCost(min(c.seconds for c in costs), min(c.cpu for c in costs), costs[0].requests)
