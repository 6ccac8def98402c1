"""Records for tests, and what a topic holds."""

from typing import Any

from aiokafka import ConsumerRecord

from pool.connection import Connection
from pool.prompts import prefix_hash
from pool.reader import open_topic
from schemas import Step
from schemas.packing import pack_ids, pack_logprobs, unpack_ids

Ids = list[int]


def step(step_id: str, prompt: Ids, response: Ids, **fields: Any) -> Step:
    return Step(
        **{
            "step_id": step_id,
            "trajectory_uid": "t",
            "prompt_uid": "p",
            "step_index": 0,
            "run": "r",
            "prompt_ids": pack_ids(prompt),
            "response_ids": pack_ids(response),
            "response_logprobs": pack_logprobs([-0.5] * len(response)),
            **fields,
        }
    )


def child(parent: Step, context: Ids, step_id: str, added: Ids, response: Ids) -> Step:
    """A Step that stores only what it adds to its parent's prompt and response."""
    return step(
        step_id,
        added,
        response,
        step_index=parent.step_index + 1,
        parent=parent.step_id,
        prefix_length=len(context),
        prefix_hash=prefix_hash(pack_ids(context)),
    )


def conversation(turns: int) -> tuple[list[Step], dict[str, Ids]]:
    """Delta-coded Steps, each the child of the one before, and their prompts in full."""
    steps = [step("s0", [1, 2, 3], [4])]
    prompts = {"s0": [1, 2, 3]}
    for turn in range(1, turns):
        parent = steps[-1]
        context = prompts[parent.step_id] + unpack_ids(parent.response_ids).tolist()
        steps.append(child(parent, context, f"s{turn}", [100 + turn], [200 + turn]))
        prompts[f"s{turn}"] = [*context, 100 + turn]
    return steps, prompts


async def content(connection: Connection, topic: str) -> list[ConsumerRecord]:
    """Everything that a reader of the topic sees, up to its present end."""
    async with open_topic(connection, topic) as reader:
        bounds = await reader.bounds(reader.partitions)
        starts = {number: found.low for number, found in bounds.items()}
        ends = {number: found.end for number, found in bounds.items()}
        return [record async for record in reader.read(starts, ends)]
