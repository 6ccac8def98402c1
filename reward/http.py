"""The worker's HTTP side: scoring on demand with the same functions, and its state."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from pool.core.progress import Received
from pool.core.trajectories import Trajectory, TrajectoryAssembler
from reward.worker import Job, Scorer
from schemas import Step, TrajectoryEnd
from schemas.packing import pack_ids, pack_logprobs
from servicekit.status import error_response, make_status_app

STALLED_AFTER = 60.0
ANSWER_LIMIT = 110.0
"""Seconds; the gateway waits for 120."""


class Asked(msgspec.Struct):
    """The body of /compute_reward; what is not for us is ignored."""

    prompt_ids: list[int]
    response_ids: list[int]
    extra_fields: dict[str, Any] | None = None
    dataset_fields: dict[str, Any] | None = None


def make_app(scorer: Scorer, has_functions: bool, progressed: Callable[[], float]) -> FastAPI:
    """`progressed` says when the worker last committed, on the monotonic clock."""

    def stalled() -> str | None:
        silent = time.monotonic() - progressed()
        return f"nothing was committed for {silent:.0f} s" if silent > STALLED_AFTER else None

    app = make_status_app("steplog reward", stalled)

    @app.post("/compute_reward")
    async def compute_reward(request: Request) -> Response:
        if not has_functions:
            return error_response(
                503, "no reward function is configured: start the worker with --function"
            )
        try:
            asked = msgspec.json.decode(await request.body(), type=Asked)
            trajectory = as_trajectory(asked)
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
            return error_response(422, f"the request body cannot be used: {error}")
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                return _answer(await score(scorer, trajectory))
        except TimeoutError:
            return error_response(503, f"the functions did not come back within {ANSWER_LIMIT:g} s")

    return app


async def score(scorer: Scorer, trajectory: Trajectory) -> Job:
    loop = asyncio.get_running_loop()
    scored: asyncio.Future[Job] = loop.create_future()

    def give(job: Job) -> None:
        if not scored.done():  # the client may have gone
            scored.set_result(job)

    def back(job: Job) -> None:
        loop.call_soon_threadsafe(give, job)

    scorer.submit(Job(trajectory, back))
    return await scored


def as_trajectory(asked: Asked) -> Trajectory:
    """One call without a log: a trajectory of one Step."""
    named: dict[str, Any] = {"trajectory_uid": "asked", "prompt_uid": "asked", "run": ""}
    metadata = msgspec.json.encode((asked.dataset_fields or {}) | (asked.extra_fields or {}))
    step = Step(
        **named,
        step_id="asked",
        step_index=0,
        prompt_ids=pack_ids(asked.prompt_ids),
        response_ids=pack_ids(asked.response_ids),
        response_logprobs=pack_logprobs([0.0] * len(asked.response_ids)),
    )
    end = TrajectoryEnd(
        **named, end_id="asked", status="completed", steps=1, metadata=metadata.decode()
    )
    assembler = TrajectoryAssembler()
    assembler.feed(Received(step, 0, 0))
    trajectory = assembler.feed(Received(end, 0, 1))
    assert isinstance(trajectory, Trajectory)
    return trajectory


def _answer(job: Job) -> Response:
    failure = job.failure
    if failure is not None:
        return error_response(422, f"reward {failure.name}: {failure.failure}")
    given = [o.value * o.weight for o in job.opinions if o.value is not None]
    body = {
        "reward_score": sum(given) if given else None,
        "reward_extra_info": {
            o.name: {
                "value": o.value,
                "weight": o.weight,
                "details": msgspec.Raw(o.details.encode()),
            }
            for o in job.opinions
        },
    }
    return Response(msgspec.json.encode(body), media_type="application/json")
