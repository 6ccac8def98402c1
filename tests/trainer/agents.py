"""Agents and reward workers in one: groups of trajectories, written where a trainer reads them."""

import random
from collections.abc import Sequence

from pool.connection import Connection
from pool.core.trajectories import annotate
from pool.topics import REWARDED, STEPS
from schemas import Record, Segment, Step, TrajectoryEnd
from schemas.packing import pack_ids, pack_logprobs
from tests.pool.log import write

RUN = "run"
VOCABULARY = 256


def group(
    prompt: str,
    *,
    size: int = 4,
    version: int = 0,
    seed: int = 0,
    rewards: Sequence[float] | None = None,
    tokens: int = 8,
    incarnation: int = 1,
    tokenizer: str = "",
    metadata: str = "{}",
) -> list[Record]:
    """The records of a whole group; every trajectory has one Step."""
    chance = random.Random(f"{prompt} {seed}")
    ids = [chance.randrange(VOCABULARY) for _ in range(6)]
    records: list[Record] = []
    for place in range(size):
        uid = f"{prompt}-{place}"
        response = [chance.randrange(VOCABULARY) for _ in range(chance.randint(2, tokens))]
        records.append(
            Step(
                step_id=f"{uid}-0",
                trajectory_uid=uid,
                prompt_uid=prompt,
                step_index=0,
                run=RUN,
                prompt_ids=pack_ids(ids),
                response_ids=pack_ids(response),
                response_logprobs=pack_logprobs([-chance.uniform(4, 7) for _ in response]),
                segments=[Segment(incarnation=incarnation, version=version, first_token=0)],
                group_size=size,
                tokenizer=tokenizer,
            )
        )
        reward = rewards[place] if rewards is not None else float(place % 2)
        records.append(
            TrajectoryEnd(
                end_id=f"end-{uid}",
                trajectory_uid=uid,
                prompt_uid=prompt,
                run=RUN,
                status="completed",
                steps=1,
                reward=reward,
                metadata=metadata,
                group_size=size,
            )
        )
    return records


def submit(connection: Connection, records: Sequence[Record]) -> None:
    """To `steps`, and from there to `rewarded` as a reward worker does."""
    places = write(connection, STEPS, records)
    copies = [annotate(record, place) for record, place in zip(records, places, strict=True)]
    write(connection, REWARDED, copies)


def submit_groups(connection: Connection, names: Sequence[str], **fields: object) -> None:
    submit(connection, [r for name in names for r in group(name, **fields)])  # type: ignore[arg-type]
