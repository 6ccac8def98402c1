"""Routes for agents that handle token ids themselves: generate, submit Steps, compute a reward."""

import asyncio
import math
import time
from collections import defaultdict
from functools import partial
from typing import Annotated, Any

import aiohttp
import msgspec

from gateway.calls.generation import Generator
from gateway.dialects.request import Request
from gateway.dialects.sampling import SamplingBody, stop_strings
from gateway.engines.engine import TROUBLES
from gateway.engines.policy import Policy
from gateway.errors import BadRequest, Conflict, EngineFailed, Unavailable, Unprocessable, decoded
from gateway.http.bodies import decode, finite, metadata_text
from gateway.state.log import Log
from gateway.state.trajectories import Completion, Trajectories
from gateway.state.trajectory import Trajectory
from pool.core.prompts import encode_prompt
from pool.core.submitted_steps import WITHOUT_LOGPROBS, SubmittedStep, TokenId, step_id
from schemas import Segment, Step
from schemas.packing import pack_ids, pack_logprobs

REWARD_TIMEOUT = aiohttp.ClientTimeout(total=120)


class GenerateBody(msgspec.Struct, kw_only=True):
    prompt_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: dict[str, Any] = {}
    image_data: Any = None
    video_data: Any = None


class SubmitBody(msgspec.Struct, kw_only=True):
    steps: Annotated[list[SubmittedStep], msgspec.Meta(min_length=1, max_length=10_000)]


async def generate(generator: Generator, body: bytes) -> bytes:
    """Ids in, ids out; nothing is recorded."""
    asked = decode(body, GenerateBody)
    if asked.image_data or asked.video_data:
        raise BadRequest("this gateway takes text only; leave image_data and video_data empty")
    request = Request(prompt=asked.prompt_ids, sampling=_sampling(asked.sampling_params))
    outcome = await generator.generate(request, asked.prompt_ids, None, None)
    sample = outcome.sample
    return msgspec.json.encode(
        {
            "token_ids": sample.ids,
            "log_probs": sample.logprobs,
            "stop_reason": sample.finish_reason,
            "weight_version": _newest(sample.segments),
        }
    )


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """All of vLLM's; the fields that we know ourselves have their types."""
    known = decoded(partial(msgspec.convert, type=SamplingBody), given)
    if known.n not in (None, 1):
        raise BadRequest("n must be 1: call once for each sample", param="sampling_params.n")
    sampling = {n: v for n, v in given.items() if v is not None and n not in ("logprobs", "stop")}
    stops = stop_strings(known.stop)
    return sampling | {"stop": stops} if stops else sampling


def _newest(segments: list[Segment]) -> str:
    return f"{segments[-1].incarnation}.{segments[-1].version}"


class Submission:
    """Steps that an agent sampled itself: all of them are taken, or none."""

    def __init__(self, log: Log, trajectories: Trajectories, policy: Policy) -> None:
        self._log = log
        self._trajectories = trajectories
        self._policy = policy

    async def submit(self, body: bytes, channel: str, tenant: str, scope: str) -> int:
        """`scope` goes before prompt_uids, so that tenants share no groups."""
        steps = decode(body, SubmitBody).steps
        prompts: dict[str, str] = {}
        for at, step in enumerate(steps):
            self._check(step, at)
            if prompts.setdefault(step.trajectory_uid, step.prompt_uid) != step.prompt_uid:
                raise Unprocessable(
                    f"steps[{at}] names another prompt_uid than an earlier one of its trajectory",
                    param=f"steps[{at}].prompt_uid",
                )
        by_trajectory: dict[tuple[str, str], list[SubmittedStep]] = defaultdict(list)
        for step in steps:
            by_trajectory[step.trajectory_uid, scope + step.prompt_uid].append(step)
        opened = [
            (await self._open(uid, prompt_uid, tenant, channel, members), members)
            for (uid, prompt_uid), members in by_trajectory.items()
        ]
        await asyncio.gather(*(self._write(trajectory, part) for trajectory, part in opened))
        return len(steps)

    def _check(self, step: SubmittedStep, at: int) -> None:
        logprobs = step.rollout_log_probs
        if logprobs is not None and len(logprobs) != len(step.response_ids):
            raise Unprocessable(
                f"steps[{at}] has {len(step.response_ids)} response_ids and {len(logprobs)} "
                "rollout_log_probs; send one for each id",
                param=f"steps[{at}].rollout_log_probs",
            )
        if not self._policy.was_opened(step.policy_version):
            raise Unprocessable(
                f"steps[{at}] claims policy_version {step.policy_version}, which was never opened "
                f"in run {self._policy.run}",
                param=f"steps[{at}].policy_version",
            )
        finite(step.reward)
        metadata_text(step.metadata)

    async def _open(
        self, uid: str, prompt_uid: str, tenant: str, channel: str, steps: list[SubmittedStep]
    ) -> Trajectory:
        try:
            trajectory = await self._trajectories.for_call(uid, prompt_uid, tenant, channel)
        except Conflict:
            trajectory = await self._trajectories.existing(uid, prompt_uid, tenant)
            if all(trajectory.has_step(_step_id(step)) for step in steps):
                return trajectory  # what closed it is sent again
            raise
        if channel != trajectory.registration.channel:
            await self._trajectories.change(trajectory, channel=channel)
        await self._trajectories.ensure_registered(trajectory)
        return trajectory

    async def _write(self, trajectory: Trajectory, steps: list[SubmittedStep]) -> None:
        """One after the other: a Step may refer to those that the log has."""
        for submitted in sorted(steps, key=lambda step: step.step_index):
            prompt = pack_ids(submitted.prompt_ids)
            step = self._step(trajectory, submitted, prompt)
            if not trajectory.has_step(step.step_id):
                await self._log.write(step)
                trajectory.add(step, prompt)
        if any(step.is_last for step in steps) and not trajectory.is_closed:
            await self._trajectories.complete(trajectory, Completion())

    def _step(self, trajectory: Trajectory, submitted: SubmittedStep, prompt: bytes) -> Step:
        registration = trajectory.registration
        return Step(
            step_id=_step_id(submitted),
            trajectory_uid=trajectory.uid,
            prompt_uid=registration.prompt_uid,
            step_index=submitted.step_index,
            run=registration.run,
            channel=registration.channel,
            **encode_prompt(prompt, trajectory.conversation.contexts())._asdict(),
            response_ids=pack_ids(submitted.response_ids),
            response_logprobs=pack_logprobs(
                submitted.rollout_log_probs or [math.nan] * len(submitted.response_ids)
            ),
            segments=[
                Segment(
                    incarnation=self._policy.marks.incarnation,
                    version=submitted.policy_version,
                    first_token=0,
                )
            ],
            reward=submitted.reward,
            metadata=metadata_text(submitted.metadata) or registration.metadata,
            group_size=registration.group_size,
            deadline=registration.deadline,
            tenant=registration.tenant,
            is_last=submitted.is_last,
            not_trainable=_why_not(submitted),
            created_at=int(time.time() * 1000),
        )


def _step_id(submitted: SubmittedStep) -> str:
    prompt, response = pack_ids(submitted.prompt_ids), pack_ids(submitted.response_ids)
    return step_id(submitted.trajectory_uid, submitted.step_index, prompt, response)


def _why_not(submitted: SubmittedStep) -> str | None:
    return None if submitted.rollout_log_probs else WITHOUT_LOGPROBS


async def compute_reward(session: aiohttp.ClientSession, url: str | None, body: bytes) -> bytes:
    """Answered by a reward worker."""
    if url is None:
        raise Unavailable("no reward worker is configured: start the gateway with --reward URL")
    target = f"{url.rstrip('/')}/compute_reward"
    headers = {"content-type": "application/json"}
    try:
        async with session.post(
            target, data=body, headers=headers, timeout=REWARD_TIMEOUT
        ) as response:
            answer = await response.read()
    except TROUBLES as error:
        raise EngineFailed("the reward worker did not answer") from error
    if response.status in (400, 422):
        raise Unprocessable(f"the reward worker refused it: {answer[:500].decode()}")
    if response.status != 200:
        raise EngineFailed(f"the reward worker answered {response.status}")
    return answer
