"""Full prompts for a reader that starts in the middle of a topic.

A delta-coded prompt needs its parents, which may lie before the first record that is read.
`PromptHistory` remembers the Steps that were read, and reads further back when those are not enough.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pool.connection import Connection
from pool.core.prompts import BrokenPrompt, full_prompt
from pool.readers.reader import TopicReader, open_topic
from schemas import Codec, SchemaError, Step

FIRST_LOOK = 1_000
"""How many records before the Step are read at first; each further look goes eight times as far."""
REMEMBERED = 4_096
"""How many Steps' contexts are kept in memory."""


class PromptHistory:
    """Created by `open_prompt_history`. Pass it every Step in the order of its partition."""

    def __init__(self, reader: TopicReader, codec: Codec) -> None:
        self._reader = reader
        self._codec = codec
        self._contexts: OrderedDict[str, bytes] = OrderedDict()

    async def prompt(self, step: Step, partition: int, offset: int) -> bytes:
        """The full packed prompt; raises BrokenPrompt when the log does not have all of it."""
        if step.parent is not None and step.parent not in self._contexts:
            await self._look_back(step, partition, offset)
        prompt = full_prompt(step, self._contexts)
        self._remember(step, prompt)
        return prompt

    async def _look_back(self, step: Step, partition: int, offset: int) -> None:
        low = (await self._reader.bounds([partition]))[partition].low
        distance = FIRST_LOOK
        while step.parent not in self._contexts:
            start = max(low, offset - distance)
            for earlier in await self._steps_of(step.trajectory_uid, partition, start, offset):
                self._try_to_remember(earlier)
            if start == low:
                return
            distance *= 8

    async def _steps_of(self, trajectory: str, partition: int, start: int, end: int) -> list[Step]:
        steps = []
        async for message in self._reader.read({partition: start}, {partition: end}):
            try:
                record = self._codec.decode(message.value)
            except SchemaError:
                continue  # not a Step that anything could extend
            if isinstance(record, Step) and record.trajectory_uid == trajectory:
                steps.append(record)
        return steps

    def _try_to_remember(self, step: Step) -> None:
        # A Step whose own parent lies further back cannot be restored yet.
        with suppress(BrokenPrompt):
            self._remember(step, full_prompt(step, self._contexts))

    def _remember(self, step: Step, prompt: bytes) -> None:
        self._contexts[step.step_id] = prompt + step.response_ids
        self._contexts.move_to_end(step.step_id)
        while len(self._contexts) > REMEMBERED:
            self._contexts.popitem(last=False)


@asynccontextmanager
async def open_prompt_history(
    connection: Connection, topic: str, codec: Codec
) -> AsyncIterator[PromptHistory]:
    """Opens a history that looks back on a connection of its own."""
    async with open_topic(connection, topic) as reader:
        yield PromptHistory(reader, codec)
