"""Write one trajectory with two Steps to the log: `python examples/hello_log.py`."""

import asyncio
import os
import sys
import uuid

from pool.connection import Connection
from pool.core.prompts import encode_prompt
from pool.producers.producer import Producer
from pool.topics import STEPS
from schemas import Step, TrajectoryEnd
from schemas.packing import pack_ids, pack_logprobs


async def main(bootstrap: str) -> None:
    connection = Connection(bootstrap=bootstrap)
    common = {"trajectory_uid": uuid.uuid4().hex, "prompt_uid": "what-is-2-plus-2", "run": "hello"}
    question = pack_ids(range(100, 120))
    first = Step(
        step_id=uuid.uuid4().hex,
        step_index=0,
        prompt_ids=question,
        response_ids=pack_ids([7, 8, 9]),
        response_logprobs=pack_logprobs([-0.1, -0.7, -0.2]),
        **common,
    )
    # The second prompt continues the first answer, so only its new ids are stored.
    prompt = question + first.response_ids + pack_ids([200, 201])
    second = Step(
        step_id=uuid.uuid4().hex,
        step_index=1,
        response_ids=pack_ids([4, 2]),
        response_logprobs=pack_logprobs([-0.3, -0.05]),
        **encode_prompt(prompt, {first.step_id: question + first.response_ids})._asdict(),
        **common,
    )
    end = TrajectoryEnd(end_id=uuid.uuid4().hex, status="completed", steps=2, reward=1.0, **common)
    async with Producer(connection, connection.codec()) as producer:
        for record in (first, second, end):
            position = await producer.send(STEPS, common["prompt_uid"], record)
            sys.stdout.write(
                f"{type(record).__name__}: partition {position.partition}, offset {position.offset}\n"
            )


if __name__ == "__main__":
    asyncio.run(main(os.environ.get("STEPLOG_BOOTSTRAP", "127.0.0.1:9092")))
