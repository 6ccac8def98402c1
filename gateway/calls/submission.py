"""Steps that white-box agents sampled themselves and submit with POST /submit_steps."""

import asyncio
import math
import time
from collections import defaultdict
from typing import Annotated

import msgspec

from gateway.dialects.sampling import check_sampling
from gateway.engines.policy import Policy
from gateway.errors import Conflict, Unprocessable
from gateway.http.bodies import check_reward, decode, metadata_text
from gateway.state.completion import Completion
from gateway.state.log import StepsLog
from gateway.state.trajectories import Trajectories
from gateway.state.trajectory import TrajectoryState
from pool.core.logprobs import find_logprob_problem
from pool.core.prompts import encode_prompt
from pool.core.submitted_steps import SubmittedStep, step_id
from schemas import Segment, Step
from schemas.packing import pack_ids, pack_logprobs


class SubmitBody(msgspec.Struct, kw_only=True):
    steps: Annotated[list[SubmittedStep], msgspec.Meta(min_length=1, max_length=10_000)]


class Submission:
    """Checks and writes submitted Steps: all Steps of a request are accepted, or none."""

    def __init__(self, log: StepsLog, trajectories: Trajectories, policy: Policy) -> None:
        self._log = log
        self._trajectories = trajectories
        self._policy = policy

    async def submit(self, body: bytes, channel: str, tenant: str, scope: str) -> int:
        """Writes the Steps of a body and returns their number. `scope` is prefixed to prompt_uids,
        so that tenants share no groups."""
        steps = decode(body, SubmitBody).steps
        prompts: dict[str, str] = {}
        for at, step in enumerate(steps):
            self._check(step, at)
            if prompts.setdefault(step.trajectory_uid, step.prompt_uid) != step.prompt_uid:
                raise Unprocessable(
                    f"steps[{at}].prompt_uid differs from an earlier Step of trajectory "
                    f"{step.trajectory_uid}. All Steps of a trajectory have one prompt_uid.",
                    param=f"steps[{at}].prompt_uid",
                )
        by_trajectory: dict[tuple[str, str], list[SubmittedStep]] = defaultdict(list)
        for step in steps:
            by_trajectory[step.trajectory_uid, scope + step.prompt_uid].append(step)
        opened = [
            (await self._open(uid, prompt_uid, tenant, channel, members), members)
            for (uid, prompt_uid), members in by_trajectory.items()
        ]
        await asyncio.gather(*(self._write(trajectory, members) for trajectory, members in opened))
        return len(steps)

    def _check(self, step: SubmittedStep, at: int) -> None:
        logprobs = step.rollout_log_probs
        if logprobs is not None and len(logprobs) != len(step.response_ids):
            raise Unprocessable(
                f"steps[{at}] has {len(step.response_ids)} response_ids but {len(logprobs)} "
                "rollout_log_probs. Send one logprob per id.",
                param=f"steps[{at}].rollout_log_probs",
            )
        problem = find_logprob_problem(logprobs or [])
        if problem is not None:
            raise Unprocessable(
                f"steps[{at}] has {problem}. Send the natural logarithm of each sampled token's "
                "probability.",
                param=f"steps[{at}].rollout_log_probs",
            )
        if not self._policy.was_opened(step.policy_version):
            raise Unprocessable(
                f"steps[{at}].policy_version is {step.policy_version}, which run {self._policy.run} "
                "has not opened. GET /policy returns the current version.",
                param=f"steps[{at}].policy_version",
            )
        check_sampling(step.sampling or {}, f"steps[{at}].sampling")
        check_reward(step.reward)
        metadata_text(step.metadata)

    async def _open(
        self, uid: str, prompt_uid: str, tenant: str, channel: str, steps: list[SubmittedStep]
    ) -> TrajectoryState:
        try:
            trajectory = await self._trajectories.for_call(uid, prompt_uid, tenant, channel)
        except Conflict:
            trajectory = await self._trajectories.existing(uid, prompt_uid, tenant)
            if all(trajectory.has_step(_step_id(step)) for step in steps):
                return trajectory  # a retry of the request that closed it
            raise
        if channel != trajectory.registration.channel:
            await self._trajectories.registrar.change(trajectory, channel=channel)
        await self._trajectories.registrar.ensure_registered(trajectory)
        return trajectory

    async def _write(self, trajectory: TrajectoryState, steps: list[SubmittedStep]) -> None:
        """Writes one after the other: a Step's prompt may refer to Steps that the log has."""
        for submitted in sorted(steps, key=lambda step: step.step_index):
            prompt = pack_ids(submitted.prompt_ids)
            step = self._step(trajectory, submitted, prompt)
            if not trajectory.has_step(step.step_id):
                await self._log.write(step)
                trajectory.add(step, prompt)
        if any(step.is_last for step in steps) and not trajectory.is_closed:
            await self._trajectories.complete(trajectory, Completion())

    def _step(self, trajectory: TrajectoryState, submitted: SubmittedStep, prompt: bytes) -> Step:
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
            sampling=submitted.stored_sampling,
            reward=submitted.reward,
            metadata=metadata_text(submitted.metadata) or registration.metadata,
            group_size=registration.group_size,
            deadline=registration.deadline,
            tenant=registration.tenant,
            is_last=submitted.is_last,
            not_trainable=submitted.not_trainable,
            created_at=int(time.time() * 1000),
        )


def _step_id(submitted: SubmittedStep) -> str:
    prompt, response = pack_ids(submitted.prompt_ids), pack_ids(submitted.response_ids)
    return step_id(submitted.trajectory_uid, submitted.step_index, prompt, response)
