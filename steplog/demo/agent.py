"""The demo's agent: OpenAI's own client, a tool and a loop. It knows nothing about training.

Two things make its calls training data: its base URL, which names the trajectory and the prompt,
and the request that completes the trajectory. All attempts at one question form a group.
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

MAX_RETRIES = 1_000
"""The gateway may ask a group to wait (429); the client retries by itself."""
MAX_TOKENS = 12


class ChatLine(NamedTuple):
    role: str
    text: str


OnConversation = Callable[[str, Sequence[ChatLine]], None]
"""Called with a trajectory's name and its conversation."""


async def find_key(client: AsyncOpenAI, search: Search) -> list[ChatLine]:
    """One conversation, up to the answer or the first mistake."""
    messages: list[Any] = [{"role": "user", "content": search.question}]
    lines = [ChatLine("user", search.question)]
    for turn in range(TURNS):
        answer = await client.chat.completions.create(
            model="default", messages=messages, tools=[ASK], max_tokens=MAX_TOKENS, temperature=1.0
        )
        message: Any = answer.choices[0].message
        lines.append(ChatLine("model", _format_message(message)))
        reply = _use_tool(search, turn, message)
        if reply is None:
            break
        messages.append(message.model_dump(exclude_none=True))
        call = message.tool_calls[0]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": reply})
        lines.append(ChatLine("tool", reply))
    return lines


def _use_tool(search: Search, turn: int, message: Any) -> str | None:
    """The tool's reply; None if the model has answered or asked the wrong person."""
    calls = message.tool_calls or []
    if len(calls) != 1 or turn == TURNS - 1:
        return None
    try:
        who = json.loads(calls[0].function.arguments)["who"]
    except (ValueError, KeyError, TypeError):
        return None
    return search.reply(turn) if who == search.words[turn] else None


def _format_message(message: Any) -> str:
    calls = [
        f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or []
    ]
    return " ".join([message.content or "", *calls]).strip()


class DemoAgents:
    """Many agents at the same time, working on question after question."""

    def __init__(
        self, gateway: str, group_size: int, concurrency: int, on_conversation: OnConversation
    ) -> None:
        self._gateway = gateway
        self._group_size = group_size
        self._concurrency = concurrency
        self._on_conversation = on_conversation
        self._numbers = count()
        self._name = uuid.uuid4().hex[:6]
        self._random = Random(self._name)

    async def work(self) -> None:
        """Runs until it is cancelled."""
        async with (
            AsyncOpenAI(api_key="none", base_url=self._gateway, max_retries=MAX_RETRIES) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self._concurrency):
                tasks.create_task(self._work_on_questions(client))

    async def _work_on_questions(self, client: AsyncOpenAI) -> None:
        for number in self._numbers:
            prompt, search = f"{self._name}-{number}", Search.draw(self._random)
            names = [f"{prompt}-{number}" for number in range(self._group_size)]
            # Admission is per group, so the others register after the first.
            first = await self._register(client, names[0], prompt, search)
            others = [self._register(client, name, prompt, search) for name in names[1:]]
            clients = [first, *await asyncio.gather(*others)]
            await asyncio.gather(*map(self._attempt, names, clients, [search] * len(names)))

    async def _register(
        self, client: AsyncOpenAI, name: str, prompt: str, search: Search
    ) -> AsyncOpenAI:
        trajectory_client = client.with_options(base_url=f"{self._gateway}/{name}/{prompt}/v1")
        registration = {"metadata": {"words": search.words}, "group_size": self._group_size}
        await trajectory_client.post("/register_trajectory", body=registration, cast_to=object)
        return trajectory_client

    async def _attempt(self, name: str, client: AsyncOpenAI, search: Search) -> None:
        self._on_conversation(name, await find_key(client, search))
        await client.post("/complete_trajectory", body={}, cast_to=object)
