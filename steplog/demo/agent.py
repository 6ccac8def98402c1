"""The demo's agent: OpenAI's own client, a tool, and a loop. It knows nothing of training.

What makes it train is its base URL, with a name for this try and one for its question; and that it
says when it is done. All tries at one question form a group.
"""

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from steplog.demo.task import ASK, TURNS, Search

PATIENCE = 1_000
"""A group may be told to come back later (429); the client does so by itself."""
TOKENS = 12


class Line(NamedTuple):
    role: str
    text: str


Heard = Callable[[str, Sequence[Line]], None]
"""Is told a trajectory's name, and what was said in it."""


async def find_the_key(client: AsyncOpenAI, search: Search) -> list[Line]:
    """One conversation, to the answer or the first mistake."""
    messages: list[Any] = [{"role": "user", "content": search.question}]
    heard = [Line("user", search.question)]
    for turn in range(TURNS):
        answer = await client.chat.completions.create(
            model="default", messages=messages, tools=[ASK], max_tokens=TOKENS, temperature=1.0
        )
        message: Any = answer.choices[0].message
        heard.append(Line("model", _shown(message)))
        reply = _use_tool(search, turn, message)
        if reply is None:
            break
        messages.append(message.model_dump(exclude_none=True))
        call = message.tool_calls[0]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": reply})
        heard.append(Line("tool", reply))
    return heard


def _use_tool(search: Search, turn: int, message: Any) -> str | None:
    """None: the model has answered, or asked somebody who knows nothing."""
    calls = message.tool_calls or []
    if len(calls) != 1 or turn == TURNS - 1:
        return None
    try:
        who = json.loads(calls[0].function.arguments)["who"]
    except (ValueError, KeyError, TypeError):
        return None
    return search.reply(turn) if who == search.words[turn] else None


def _shown(message: Any) -> str:
    calls = [
        f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or []
    ]
    return " ".join([message.content or "", *calls]).strip()


class Agents:
    """Many of them at the same time, question after question."""

    def __init__(self, gateway: str, group_size: int, at_once: int, heard: Heard) -> None:
        self._gateway = gateway
        self._group_size = group_size
        self._at_once = at_once
        self._heard = heard
        self._numbers = count()
        self._name = uuid.uuid4().hex[:6]
        self._chance = Random(self._name)

    async def work(self) -> None:
        """Never ends by itself."""
        async with (
            AsyncOpenAI(api_key="none", base_url=self._gateway, max_retries=PATIENCE) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self._at_once):
                tasks.create_task(self._questions(client))

    async def _questions(self, client: AsyncOpenAI) -> None:
        for number in self._numbers:
            prompt, search = f"{self._name}-{number}", Search.draw(self._chance)
            names = [f"{prompt}-{place}" for place in range(self._group_size)]
            # One asks for admission, and the group has it.
            first = await self._begin(client, names[0], prompt, search)
            others = [self._begin(client, name, prompt, search) for name in names[1:]]
            clients = [first, *await asyncio.gather(*others)]
            await asyncio.gather(*map(self._try, names, clients, [search] * len(names)))

    async def _begin(
        self, client: AsyncOpenAI, name: str, prompt: str, search: Search
    ) -> AsyncOpenAI:
        ours = client.with_options(base_url=f"{self._gateway}/{name}/{prompt}/v1")
        about = {"metadata": {"words": search.words}, "group_size": self._group_size}
        await ours.post("/register_trajectory", body=about, cast_to=object)
        return ours

    async def _try(self, name: str, client: AsyncOpenAI, search: Search) -> None:
        self._heard(name, await find_the_key(client, search))
        await client.post("/complete_trajectory", body={}, cast_to=object)
