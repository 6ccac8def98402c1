"""Records to measure with. Tokens are random: repeated ones would compress better than real data."""

import os
import random
from collections.abc import Iterator

from schemas import Record, Segment, Step, TrajectoryEnd
from schemas.packing import pack_ids, pack_logprobs

VOCABULARY = 151_643
GROUP_SIZE = 8
STEPS_EACH = 4


def tokens(count: int) -> bytes:
    return pack_ids(random.choices(range(VOCABULARY), k=count))


def logprobs(count: int) -> bytes:
    return pack_logprobs(-random.expovariate(2.0) for _ in range(count))


class StepFactory:
    """Makes groups of trajectories with Steps of a given number of tokens. Their contents come from a
    small stock, so that making records does not take longer than moving them."""

    def __init__(self, prompt: int, response: int, stock: int = 256) -> None:
        self._bodies = [
            (tokens(prompt), tokens(response), logprobs(response)) for _ in range(stock)
        ]

    def records(self, groups: int) -> Iterator[Record]:
        for group in range(groups):
            trajectories = [self.trajectory(f"prompt-{group}", n) for n in range(GROUP_SIZE)]
            for step in zip(*trajectories, strict=True):
                yield from step

    def trajectory(self, prompt_uid: str, number: int) -> Iterator[Record]:
        uid = f"{prompt_uid}-{number}"
        for index in range(STEPS_EACH):
            prompt_ids, response_ids, response_logprobs = random.choice(self._bodies)
            yield Step(
                step_id=f"{uid}-{index}-{os.urandom(8).hex()}",
                trajectory_uid=uid,
                prompt_uid=prompt_uid,
                step_index=index,
                run="bench",
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                response_logprobs=response_logprobs,
                segments=[Segment(incarnation=1, version=1, first_token=0)],
                model="bench",
                tokenizer="0123456789abcdef",
                request_hash=os.urandom(8),
                metadata='{"answer": "42"}',
                group_size=GROUP_SIZE,
                deadline=1_900_000_000_000,
                created_at=1_800_000_000_000,
            )
        yield TrajectoryEnd(
            end_id=f"{uid}-end",
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            run="bench",
            status="completed",
            steps=STEPS_EACH,
            reward=random.random(),
            group_size=GROUP_SIZE,
        )


def key(record: Record) -> str:
    return str(getattr(record, "prompt_uid"))  # noqa: B009
