"""What a topic holds, and conversations to write into one."""

from aiokafka import ConsumerRecord

from pool.connection import Connection
from pool.readers.reader import open_topic
from schemas import Step
from schemas.packing import unpack_ids
from tests.pool.records import child, step


async def content(connection: Connection, topic: str) -> list[ConsumerRecord]:
    """Everything that a reader of the topic sees, up to its present end."""
    async with open_topic(connection, topic) as reader:
        return [record async for record in reader.read_all()]


def conversation(turns: int) -> tuple[list[Step], list[list[int]]]:
    """Delta-coded Steps, each the child of the one before, and their prompts in full."""
    prompts = [list(range(20))]
    steps = [step("s0", ids=prompts[0])]
    for turn in range(1, turns):
        context = [*prompts[-1], *unpack_ids(steps[-1].response_ids)]
        prompts.append([*context, 100 + turn])
        steps.append(child(f"s{turn}", steps[-1], context, [100 + turn]))
    return steps, prompts
