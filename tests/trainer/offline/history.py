"""A log with a past: groups that were made side by side, and whatever else is found in one."""

import random
from pathlib import Path
from typing import Any

from pool.connection import Connection
from schemas import Feedback, Record
from tests.trainer.agents import RUN, group, submit
from tests.trainer.trainer_process import settings_of

AGAIN = "again"
"""The name of an offline run."""


def history(prompts: int, seed: int = 0) -> list[Record]:
    """Trajectories of several groups at a time, in a drawn order. Some groups teach nothing, some are
    never complete, and some get Feedback after they were."""
    chance = random.Random(seed)
    made: list[Record] = []
    for first in range(0, prompts, 5):
        pairs: list[list[Record]] = []
        for number in range(first, min(first + 5, prompts)):
            records = group(f"p{number}", rewards=[1.0] * 4 if number % 4 == 3 else None)
            kept = 3 if number % 7 == 5 else 4
            pairs += [records[2 * place : 2 * place + 2] for place in range(kept)]
        chance.shuffle(pairs)
        made += [record for pair in pairs for record in pair]
        made.append(feedback(f"p{first}"))
    return made


def feedback(prompt: str) -> Feedback:
    return Feedback(
        feedback_id=f"feedback-{prompt}",
        trajectory_uid=f"{prompt}-0",
        prompt_uid=prompt,
        run=RUN,
        reward=0.25,
    )


def write_history(connection: Connection, prompts: int, seed: int = 0) -> None:
    submit(connection, history(prompts, seed))


def offline(connection: Connection, model: Path, folder: Path, **fields: Any) -> dict[str, Any]:
    given = settings_of(connection, model, folder, run=AGAIN, offline=True)
    del given["weights_retry_s"]
    return given | fields
