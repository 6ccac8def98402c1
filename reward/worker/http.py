"""The worker's HTTP app: /compute_reward scores on demand with the same functions; status pages."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from pool.core.progress import Received
from pool.core.trajectories import Trajectory, TrajectoryAssembler
from reward.scoring.rewarded import reward_of_end
from reward.scoring.scorer import Scorer, ScoringJob
from schemas import Step, TrajectoryEnd
from schemas.packing import pack_ids, pack_logprobs
from servicekit.status import error_response, make_status_app

STALLED_AFTER_S = 60.0
ANSWER_TIMEOUT_S = 110.0
"""Less than the 120 s for which the gateway waits."""


class RewardRequest(msgspec.Struct):
    """The body of /compute_reward; other fields are ignored."""

    prompt_ids: list[int]
    response_ids: list[int]
    extra_fields: dict[str, Any] | None = None
    dataset_fields: dict[str, Any] | None = None


def make_app(scorer: Scorer, has_functions: bool, last_progress: Callable[[], float]) -> FastAPI:
    """`last_progress` returns when the worker last committed, on the monotonic clock."""

    def find_problem() -> str | None:
        idle_s = time.monotonic() - last_progress()
        return f"nothing was committed for {idle_s:.0f} s" if idle_s > STALLED_AFTER_S else None

    app = make_status_app("steplog reward", find_problem)

    @app.post("/compute_reward")
    async def compute_reward(request: Request) -> Response:
        if not has_functions:
            return error_response(
                503, "No reward function is configured: start the worker with --function."
            )
        try:
            body = msgspec.json.decode(await request.body(), type=RewardRequest)
            trajectory = as_trajectory(body)
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
            return error_response(422, f"Invalid request body: {error}")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return _response(await score(scorer, trajectory))
        except TimeoutError:
            return error_response(
                503, f"The reward functions did not return within {ANSWER_TIMEOUT_S:g} s."
            )

    return app


async def score(scorer: Scorer, trajectory: Trajectory) -> ScoringJob:
    loop = asyncio.get_running_loop()
    scored: asyncio.Future[ScoringJob] = loop.create_future()

    def resolve(job: ScoringJob) -> None:
        if not scored.done():  # it is cancelled when the client has gone
            scored.set_result(job)

    def on_scored(job: ScoringJob) -> None:
        loop.call_soon_threadsafe(resolve, job)

    scorer.submit(ScoringJob(trajectory, on_scored))
    return await scored


def as_trajectory(request: RewardRequest) -> Trajectory:
    """A trajectory of one Step, which exists in this request only and not in the log."""
    ids: dict[str, Any] = {"trajectory_uid": "asked", "prompt_uid": "asked", "run": ""}
    metadata = msgspec.json.encode((request.dataset_fields or {}) | (request.extra_fields or {}))
    step = Step(
        **ids,
        step_id="asked",
        step_index=0,
        prompt_ids=pack_ids(request.prompt_ids),
        response_ids=pack_ids(request.response_ids),
        response_logprobs=pack_logprobs([0.0] * len(request.response_ids)),
    )
    end = TrajectoryEnd(
        **ids, end_id="asked", status="completed", steps=1, metadata=metadata.decode()
    )
    assembler = TrajectoryAssembler()
    assembler.feed(Received(step, 0, 0))
    trajectory = assembler.feed(Received(end, 0, 1))
    assert isinstance(trajectory, Trajectory)
    return trajectory


def _response(job: ScoringJob) -> Response:
    failure = job.failure
    if failure is not None:
        return error_response(422, f"reward {failure.name}: {failure.failure}")
    assert isinstance(job.item, Trajectory)
    body = {
        "reward_score": reward_of_end(job.item, job.results)[0],
        "reward_extra_info": {
            r.name: {
                "value": r.value,
                "weight": r.weight,
                "details": msgspec.Raw(r.details.encode()),
            }
            for r in job.results
        },
    }
    return Response(msgspec.json.encode(body), media_type="application/json")
