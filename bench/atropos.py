"""The Atropos API beside Atropos' own server, in the same run: posts, batches and polls.

Its server is `run-api` of atroposlib, which the extra `peers` installs. Posts come from eight clients
that keep their connections; what counts is the server's processor time, since the machine is shared
with the clients. It is shared with others too, who come and go: so posts are measured in turns, one
side after the other, and the best turn of each counts.

Posts are measured twice, the second time with processors that do not sleep. On a virtual machine who
has slept works slowly for a while, and only the server that waits for a broker sleeps.
"""

import asyncio
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from pool import topics
from pool.connection import Connection
from tests.conftest import free_port
from tests.gateway.atropos.running import ENV, TRAINING, running_atropos

CLIENTS = 8
POST_SHAPES = {(4, 64): 2560, (8, 512): 400, (8, 2048): 96}
"""Sequences and tokens of a group, and how many are posted in a turn: each client as many, also of
those in lists."""
TURNS = 5
WARM_UP = 4
"""So many times fewer are posted first: a server runs for days."""
ALONE = 400
"""Posts of a client that has nobody beside it."""
LISTED = 16
"""Small groups in one post of a list."""
DEPTHS = (0, 1_000, 10_000)
POLLS = 100
LONGEST_S = 60
"""Of a request: beyond it, a side is given up."""
VOCABULARY = 150_000
GZIP = b"\x1f\x8b"
"""What a compressed body begins with."""


class Side(NamedTuple):
    name: str
    url: str
    pid: int

    @property
    def cpu(self) -> float:
        """Seconds of processor time, with all processes that serve."""
        root = psutil.Process(self.pid)
        used = [p.cpu_times() for p in (root, *root.children(recursive=True))]
        return float(sum(times.user + times.system for times in used))


class Spent(NamedTuple):
    seconds: float
    cpu: float
    times: int = 1


def run(connection: Connection) -> None:
    topics.create(connection)
    with running_atropos(connection) as ours, _their_server() as theirs:
        sides = [
            Side("atroposlib", theirs[0], theirs[1]),
            Side("steplog", ours.url, ours.process.pid),
        ]
        asyncio.run(_compare(sides))


@contextmanager
def _their_server() -> Iterator[tuple[str, int]]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("run-api")), "--port", str(port)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.kill()  # it may form batches for minutes yet
            process.wait()


async def _compare(sides: list[Side]) -> None:
    limit = aiohttp.ClientTimeout(total=LONGEST_S)
    async with aiohttp.ClientSession(timeout=limit) as session:
        for side in sides:
            await _until_up(session, side)
        await _show_posts(session, sides, "")
        with _awake():
            await _show_posts(session, sides, ", processors kept awake")
        print("\nOther ways to post")
        alone = partial(_posts, session, body=_body(4, 64), count=ALONE, clients=1)
        await _show("4 x 64 tokens, one client", sides, alone, TURNS)
        listed = partial(_lists, session)
        await _show(f"a list of {LISTED} x (4 x 64), for each", sides, listed, TURNS)
        print("\nGET /batch, 64 sequences of 2,048 tokens, already formed")
        for encoding in ("identity", "gzip"):
            await _show(
                encoding,
                sides,
                lambda side, encoding=encoding: _ready_batch(session, side, encoding),  # type: ignore[misc]
            )
        for share in (None, 0.25):
            print(f"\nBy queue length, groups of 8 x 64, minimum allocation {share}")
            for depth in DEPTHS:
                await _by_depth(session, sides, depth, share)


async def _show_posts(session: aiohttp.ClientSession, sides: list[Side], how: str) -> None:
    print(f"\nPOST /scored_data, tokens + masks + logprobs, {CLIENTS} clients{how}")
    for (size, tokens), count in POST_SHAPES.items():
        plain = _body(size, tokens)
        for name, body in (("", plain), (" gzip", gzip.compress(plain, 6))):
            what = f"{size} x {tokens} tokens, {len(body) / 1000:.0f} kB{name}"
            await _show(what, sides, partial(_posts, session, body=body, count=count), TURNS)


@contextmanager
def _awake() -> Iterator[None]:
    """Every processor has something to do that gives way to all else."""
    idle = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", idle]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def _until_up(session: aiohttp.ClientSession, side: Side) -> None:
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        try:
            async with session.get(f"{side.url}/info"):
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
    raise SystemExit(f"{side.name} does not answer")


def _body(size: int, tokens: int, env_id: int | None = None) -> bytes:
    rng = random.Random(size * tokens)
    ids = [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(size)]
    logprobs = [[round(-3 * rng.random(), 6) for _ in range(tokens)] for _ in range(size)]
    group = {"tokens": ids, "masks": ids, "scores": [1.0] * size, "inference_logprobs": logprobs}
    return json.dumps(group | {"env_id": env_id}).encode()


async def _show(
    what: str, sides: list[Side], work: Callable[[Side], Awaitable[Spent]], turns: int = 1
) -> None:
    measured = [[await work(side) for side in sides] for _ in range(turns)]
    spent = [_best(of_side) for of_side in zip(*measured, strict=True)]
    for side, one in zip(sides, spent, strict=True):
        cpu, wall = one.cpu / one.times * 1e3, one.seconds / one.times * 1e3
        print(f"  {what:<34} {side.name:<11} {cpu:>9.2f} ms CPU {wall:>10.2f} ms")
    theirs, ours = spent
    print(f"  {'':<34} {'ratio':<11} {theirs.cpu / max(ours.cpu, 1e-3):>8.1f} ×      "
          f"{theirs.seconds / ours.seconds:>9.1f} ×")  # fmt: skip


def _best(turns: Sequence[Spent]) -> Spent:
    return Spent(min(t.seconds for t in turns), min(t.cpu for t in turns), turns[0].times)


async def _spend(side: Side, work: Awaitable[Any], count: int = 1) -> Spent:
    cpu, began = side.cpu, time.perf_counter()
    await work
    return Spent(time.perf_counter() - began, side.cpu - cpu, count)


async def _post(session: aiohttp.ClientSession, side: Side, path: str, body: bytes) -> Any:
    headers = {"content-type": "application/json"}
    if body.startswith(GZIP):
        headers["content-encoding"] = "gzip"
    async with session.post(side.url + path, data=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def _get(session: aiohttp.ClientSession, side: Side, path: str, **options: Any) -> bytes:
    async with session.get(side.url + path, **options) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def _begin(
    session: aiohttp.ClientSession, side: Side, batch_size: int, share: float | None = None
) -> None:
    await _get(session, side, "/reset_data")
    training = json.dumps(TRAINING | {"batch_size": batch_size, "max_token_len": 4096})
    await _post(session, side, "/register", training.encode())
    await _get(session, side, "/batch")
    env = json.dumps(ENV | {"group_size": 8, "min_batch_allocation": share})
    for _ in range(2):
        await _post(session, side, "/register-env", env.encode())


async def _fill(
    session: aiohttp.ClientSession,
    side: Side,
    body: bytes,
    count: int,
    path: str = "/scored_data",
    clients: int = CLIENTS,
) -> None:
    async def client(share: int) -> None:
        for _ in range(share):
            await _post(session, side, path, body)

    await asyncio.gather(*(client(count // clients) for _ in range(clients)))


async def _posts(
    session: aiohttp.ClientSession, side: Side, body: bytes, count: int, clients: int = CLIENTS
) -> Spent:
    await _begin(session, side, 1_000_000)
    await _fill(session, side, body, count // WARM_UP, clients=clients)
    return await _spend(side, _fill(session, side, body, count, clients=clients), count)


async def _lists(session: aiohttp.ClientSession, side: Side) -> Spent:
    count = POST_SHAPES[4, 64]
    body, path = _listed(_body(4, 64), LISTED), "/scored_data_list"
    await _begin(session, side, 1_000_000)
    await _fill(session, side, body, count // LISTED // WARM_UP, path)
    return await _spend(side, _fill(session, side, body, count // LISTED, path), count)


def _listed(group: bytes, count: int) -> bytes:
    return b"[" + b",".join([group] * count) + b"]"


async def _ready_batch(session: aiohttp.ClientSession, side: Side, encoding: str) -> Spent:
    """The second of two that are formed at once."""
    await _begin(session, side, 64)
    await _fill(session, side, _body(8, 2048), 16)
    headers = {"accept-encoding": encoding}
    await _get(session, side, "/batch", headers=headers)
    return await _spend(side, _get(session, side, "/batch", headers=headers))


async def _by_depth(
    session: aiohttp.ClientSession, sides: list[Side], depth: int, share: float | None
) -> None:
    for side in sides:
        await _begin(session, side, 64, share)
        for env_id in (0, 1):
            listed = _listed(_body(8, 64, env_id), 50)
            for _ in range(depth // 100):
                await _post(session, side, "/scored_data_list", listed)

    async def polls(side: Side) -> Spent:
        async def poll() -> None:
            for _ in range(POLLS):
                await _get(session, side, "/status-env", json={"env_id": 0})

        return await _spend(side, poll(), POLLS)

    async def first_batch(side: Side) -> Spent:
        try:
            return await _spend(side, _get(session, side, "/batch"))
        except TimeoutError:
            print(f"  {side.name} has not answered /batch within {LONGEST_S} s")
            return Spent(LONGEST_S, LONGEST_S)

    await _show(f"poll, {depth:,} groups", sides, polls)
    await _show(f"first /batch, {depth:,} groups", sides, first_batch)
