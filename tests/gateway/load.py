"""Agents under way: many trajectories at once, and a record of everything that each was told.

Every call carries a text that no other has, so that its Steps are found in the log by what was
asked. A call is retried as OpenAI's clients do it: after a refused or broken connection and after
429 and 5xx, marked by `x-stainless-retry-count`, for `PATIENCE` seconds. A stream that breaks off
is asked for again by the agent itself, unmarked.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATIENCE = 120.0
BACKOFF = 0.25
NEWCOMERS_EVERY = 1.0
BROKEN = (aiohttp.ClientError, OSError, TimeoutError)
CALL_LIMIT = 120.0
FINAL = (400, 401, 404, 409, 413, 422)
"""Statuses after which a client does not try again."""


@dataclass(eq=False)
class Attempt:
    """What came back: a status, or the name of an error."""

    outcome: int | str
    began: float
    ended: float
    marked: bool
    retry_after: str | None = None
    said: str = ""


@dataclass(eq=False)
class Sent:
    """One call of an agent. With an answer, it was told the end of it."""

    uid: str
    text: str
    stream: bool
    attempts: list[Attempt] = field(default_factory=list)
    step_id: str | None = None
    content: str | None = None

    @property
    def took(self) -> float:
        return self.attempts[-1].ended - self.attempts[0].began


class Broken(Exception):
    """A stream ended without its end."""


class Load:
    """`with Load(url, agents) as load`: agents work until the end, then finish what they do.

    Each goes through trajectories of `turns` calls, one after the other, and completes them. Others
    come anew every second, however long earlier ones wait."""

    def __init__(
        self, url: str, agents: int, turns: int = 3, pause: float = 0.05, streams: float = 0.3
    ) -> None:
        self._url = url
        self._agents = agents
        self._turns = turns
        self._pause = pause
        self._streams = streams
        self._name = f"{random.randrange(16**8):08x}"
        self._random = random.Random(self._name)
        self._stop = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()))
        self.sent: list[Sent] = []
        self.completed: list[str] = []
        self.error: BaseException | None = None

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.give_up()
        self.finish()

    def finish(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def give_up(self) -> None:
        """Nothing is tried again any more."""
        self._stop.set()
        self._given_up.set()

    @property
    def answered(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.step_id is not None]

    def attempts(self) -> Iterator[Attempt]:
        for sent in list(self.sent):
            yield from list(sent.attempts)

    def outcomes(self, since: float = 0.0) -> list[int | str]:
        return [attempt.outcome for attempt in self.attempts() if attempt.began >= since]

    def wait_for_answers(self, more: int, limit: float = 90.0) -> None:
        """Until so many more calls were answered."""
        goal = len(self.answered) + more
        wait_until(lambda: self.error is not None or len(self.answered) >= goal, limit)
        assert self.error is None, self.error

    async def _work(self) -> None:
        try:
            connector = aiohttp.TCPConnector(limit=0)
            limit = aiohttp.ClientTimeout(total=CALL_LIMIT)
            async with (
                aiohttp.ClientSession(connector=connector, timeout=limit) as session,
                asyncio.TaskGroup() as group,
            ):
                for number in range(self._agents):
                    group.create_task(self._agent(session, number))
                await self._newcomers(session, group)
        except BaseException as error:
            self.error = error

    async def _agent(self, session: aiohttp.ClientSession, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            await self._trajectory(session, f"{self._name}-{number}-{count}", f"p{number % 7}")
            count += 1

    async def _newcomers(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        count = 0
        while not self._stop.is_set():
            group.create_task(self._trajectory(session, f"{self._name}-new-{count}", f"new{count}"))
            count += 1
            await asyncio.sleep(NEWCOMERS_EVERY)

    async def _trajectory(self, session: aiohttp.ClientSession, uid: str, prompt: str) -> None:
        base = f"{self._url}/{uid}/{prompt}/v1"
        messages: list[dict[str, str]] = []
        for turn in range(self._turns):
            sent = Sent(uid, f"[[{uid}.{turn}]]", self._random.random() < self._streams)
            self.sent.append(sent)
            messages.append({"role": "user", "content": sent.text})
            await self._call(session, base, sent, messages)
            if sent.content is None:
                return  # the agent gives up; its trajectory is abandoned
            messages.append({"role": "assistant", "content": sent.content})
            await asyncio.sleep(self._random.uniform(0, 2 * self._pause))
        if await self._complete(session, base):
            self.completed.append(uid)

    async def _call(
        self,
        session: aiohttp.ClientSession,
        base: str,
        sent: Sent,
        messages: list[dict[str, str]],
    ) -> None:
        about = {"model": "default", "messages": messages, "stream": sent.stream}
        body = json.dumps(about).encode()
        marked, deadline = 0, time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not self._given_up.is_set():
            began = time.monotonic()
            outcome, after, said = await self._attempt(session, base, sent, body, marked)
            ended = time.monotonic()
            sent.attempts.append(Attempt(outcome, began, ended, marked > 0, after, said))
            if outcome == 200 or outcome in FINAL:
                return
            # After a broken stream the agent itself asks again, as if it were the first time.
            marked = 0 if outcome == "Broken" else marked + 1
            await asyncio.sleep(BACKOFF * self._random.uniform(0.5, 1.5))

    async def _attempt(
        self, session: aiohttp.ClientSession, base: str, sent: Sent, body: bytes, marked: int
    ) -> tuple[int | str, str | None, str]:
        headers = {"content-type": "application/json", "x-stainless-retry-count": str(marked)}
        url = f"{base}/chat/completions"
        try:
            async with session.post(url, data=body, headers=headers) as response:
                if response.status != 200:
                    after = response.headers.get("retry-after")
                    return response.status, after, await response.text()
                answer = await response.read()
                self._take(sent, answer)
                return 200, None, ""
        except Broken as error:
            return "Broken", None, str(error)
        except BROKEN as error:
            begun = sent.stream and isinstance(error, aiohttp.ClientPayloadError)
            return "Broken" if begun else type(error).__name__, None, str(error)

    def _take(self, sent: Sent, answer: bytes) -> None:
        identity, content = read_stream(answer) if sent.stream else read_whole(answer)
        sent.step_id, sent.content = identity.removeprefix("chatcmpl-"), content

    async def _complete(self, session: aiohttp.ClientSession, base: str) -> bool:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not self._given_up.is_set():
            try:
                url = f"{base}/complete_trajectory"
                async with session.post(url, json={"reward": 1.0}) as response:
                    if response.status == 200:
                        return True
                    assert response.status in (429, 502, 503), await response.text()
            except BROKEN:
                pass
            await asyncio.sleep(BACKOFF)
        return False


def read_whole(answer: bytes) -> tuple[str, str]:
    told = json.loads(answer)
    return told["id"], told["choices"][0]["message"]["content"]


def read_stream(answer: bytes) -> tuple[str, str]:
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise Broken(answer[-300:].decode(errors="replace"))
    chunks: list[Any] = [json.loads(event) for event in events[:-1]]
    parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    (identity,) = {chunk["id"] for chunk in chunks}
    return identity, "".join(parts)


def wait_until(done: Callable[[], Any], limit: float, every: float = 0.05) -> None:
    deadline = time.monotonic() + limit
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(every)
