"""Routes of environments: start, register and complete a trajectory, and send late rewards."""

import math
import time
import uuid
from typing import Any
from urllib.parse import quote

import msgspec

from gateway.errors import BadRequest, NotFound, Unprocessable
from gateway.http.bodies import (
    CompleteBody,
    FeedbackBody,
    InitBody,
    RegisterBody,
    check_reward,
    decode,
    metadata_text,
)
from gateway.http.exchange import Exchange
from gateway.http.public_url import public_url
from gateway.routes.parts import GatewayState, prompt_scope
from gateway.routes.route import BASE_URL, RouteSpec
from gateway.state.completion import Completion
from gateway.state.trajectory import TrajectoryState
from pool.core.rewards import SCORED_STATUSES
from schemas import Feedback, StepAdvantages
from schemas.packing import pack_logprobs

OK = b'{"status":"ok"}'
ANSWER_ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""What the dialects put in front of a step_id to make an answer's id."""


async def init_trajectory(state: GatewayState, exchange: Exchange) -> None:
    parts = state.require_parts()
    tenant = parts.tenant(exchange)
    body = decode(await exchange.body(), InitBody)
    uid, prompt_uid = uuid.uuid4().hex, body.prompt_uid or uuid.uuid4().hex
    if "/" in prompt_uid or prompt_uid in (".", "..") or not prompt_uid.isprintable():
        raise BadRequest(
            "prompt_uid becomes part of the base URL: it must be printable, contain no / and not be "
            ". or ..",
            param="prompt_uid",
        )
    if body != InitBody():  # without any field, the first call registers the trajectory
        registration = parts.trajectories.registrar.new_registration(
            uid,
            prompt_scope(tenant) + prompt_uid,
            tenant,
            channel=body.channel,
            metadata=metadata_text(body.metadata),
            group_size=body.group_size,
            deadline_s=body.deadline_s,
        )
        await parts.trajectories.begin(registration)
    lifetime = body.deadline_s or parts.settings.deadline_s
    segment = parts.keys.sign(uid, tenant, int(time.time() + lifetime))
    url = f"{public_url(exchange)}/{segment}/{quote(prompt_uid, safe='')}/v1"
    await exchange.reply(200, msgspec.json.encode({"trajectory_uid": uid, "base_url": url}))


async def register_trajectory(state: GatewayState, exchange: Exchange) -> None:
    parts = state.require_parts()
    uid, tenant, prompt_uid = parts.path_ids(exchange)
    body = decode(await exchange.body(), RegisterBody)
    metadata = metadata_text(body.metadata)
    trajectory = await parts.trajectories.for_call(uid, prompt_uid, tenant, body.channel, metadata)
    fields: dict[str, Any] = {
        "channel": body.channel,
        "metadata": metadata,
        "group_size": body.group_size,
        "deadline": body.deadline_s and int((time.time() + body.deadline_s) * 1000),
    }
    changes = {name: value for name, value in fields.items() if value is not None}
    await parts.trajectories.registrar.change(trajectory, **changes)
    await exchange.reply(200, OK)


async def complete_trajectory(state: GatewayState, exchange: Exchange) -> None:
    parts = state.require_parts()
    uid, tenant, prompt_uid = parts.path_ids(exchange)
    body = decode(await exchange.body(), CompleteBody)
    reward = check_reward(body.reward)
    trajectory = await parts.trajectories.existing(uid, prompt_uid, tenant)
    completion = Completion(
        status=body.status,
        reward=reward,
        reward_expected=body.reward_expected,
        channel=body.channel,
        reason=body.reason,
        advantages=[
            _step_advantages(trajectory, answer_id, values)
            for answer_id, values in (body.advantages or {}).items()
        ],
    )
    await parts.trajectories.complete(trajectory, completion)
    await exchange.reply(200, OK)


async def give_feedback(state: GatewayState, exchange: Exchange) -> None:
    """A late reward for a trajectory or one of its Steps, open or closed."""
    parts = state.require_parts()
    uid, tenant, prompt_uid = parts.path_ids(exchange)
    body = decode(await exchange.body(), FeedbackBody)
    reward = check_reward(body.reward)
    metadata = metadata_text(body.metadata)
    trajectory = await parts.trajectories.existing(uid, prompt_uid, tenant)
    step_id = body.step_id and _find_step_id(trajectory, body.step_id)
    registration = trajectory.registration
    await parts.log.write(
        Feedback(
            feedback_id=str(uuid.uuid4()),
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            run=registration.run,
            channel=registration.channel,
            step_id=step_id,
            reward=reward or 0.0,
            metadata=metadata or "{}",
            created_at=int(time.time() * 1000),
        )
    )
    await exchange.reply(200, _feedback_reply(trajectory))


def _feedback_reply(trajectory: TrajectoryState) -> bytes:
    """Feedback is kept whatever became of its trajectory; the client learns if it cannot count."""
    status = trajectory.status
    if status is None or status in SCORED_STATUSES:
        return OK
    warning = (
        f"Trajectory {trajectory.uid} has ended with status {status}, so it is not trained. The "
        "reward is kept in the log."
    )
    return msgspec.json.encode({"status": "ok", "warning": warning})


def _step_advantages(
    trajectory: TrajectoryState, answer_id: str, values: float | list[float]
) -> StepAdvantages:
    """The advantages of one answer; 422 if they do not fit it."""
    try:
        step_id = _find_step_id(trajectory, answer_id)
    except NotFound as error:
        raise Unprocessable(str(error), param="advantages") from error
    numbers = values if isinstance(values, list) else [values]
    tokens = trajectory.response_length(step_id)
    if len(numbers) not in (1, tokens) or not all(map(math.isfinite, numbers)):
        raise Unprocessable(
            f"advantages of {answer_id} must be one finite number, or one for each of its {tokens} "
            f"tokens; there are {len(numbers)}.",
            param="advantages",
        )
    return StepAdvantages(step_id=step_id, values=pack_logprobs(numbers))


def _find_step_id(trajectory: TrajectoryState, answer_id: str) -> str:
    """The step_id of an answer's id, which is the same behind a prefix."""
    prefix = next((prefix for prefix in ANSWER_ID_PREFIXES if answer_id.startswith(prefix)), "")
    step_id = answer_id.removeprefix(prefix)
    if not trajectory.has_step(step_id):
        raise NotFound(
            f"Trajectory {trajectory.uid} has no Step {step_id}. Send the id of one of its answers, "
            "or leave step_id out to rate the whole trajectory.",
            param="step_id",
        )
    return step_id


ROUTES: list[RouteSpec] = [
    RouteSpec(
        "POST",
        "/init_trajectory",
        init_trajectory,
        "Starts a trajectory and returns its base URL",
        (400, 401, 413, 429, 503),
        InitBody,
    ),
    RouteSpec(
        "POST",
        BASE_URL + "/register_trajectory",
        register_trajectory,
        "Sets channel, metadata, group size or deadline of a trajectory",
        (400, 401, 404, 409, 413, 429, 503),
        RegisterBody,
    ),
    RouteSpec(
        "POST",
        BASE_URL + "/complete_trajectory",
        complete_trajectory,
        "Closes a trajectory, with its reward if there is one",
        (400, 401, 404, 409, 413, 422, 429, 503),
        CompleteBody,
        conditions={
            409: "The trajectory is already completed with another status, reward or channel.",
            422: "The reward is not a finite number, or the advantages do not fit the answers.",
        },
    ),
    RouteSpec(
        "POST",
        BASE_URL + "/feedback",
        give_feedback,
        "Adds a late reward for a trajectory or one of its Steps",
        (400, 401, 404, 413, 422, 429, 503),
        FeedbackBody,
        conditions={
            404: "The trajectory or the Step does not exist or belongs to another tenant, or the base "
            "URL has expired.",
            422: "The reward is not a finite number.",
        },
    ),
]
