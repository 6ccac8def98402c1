"""The Step that a call leaves in the log."""

import msgspec

from gateway import metrics
from gateway.calls.generation import Generation
from gateway.dialects.request import Request
from gateway.engines.wire import UNKNOWN_LOGPROB, SampledTokens
from gateway.state.trajectory import RecordedStep, TrajectoryState
from pool.core.prompts import encode_prompt
from pool.core.sampling import untrainable_reason
from schemas import Step
from schemas.packing import ID_BYTES, pack_ids, pack_logprobs

LABELLED_CHANNELS = ("train", "val")
"""Channels with a metric label of their own. Agents may name any channel, so others share one label."""


def make_step(
    trajectory: TrajectoryState,
    request: Request,
    generation: Generation,
    *,
    step_id: str,
    step_index: int,
    prompt: bytes,
    conversation: bytes,
    tokenizer: str,
    request_hash: bytes,
    created: int,
) -> Step:
    """The Step of a finished call. `prompt` is packed; the Step stores it as a delta."""
    sample, registration = generation.sample, trajectory.registration
    stored_prompt = encode_prompt(prompt, trajectory.conversation.contexts())
    return Step(
        step_id=step_id,
        trajectory_uid=registration.trajectory_uid,
        prompt_uid=registration.prompt_uid,
        step_index=step_index,
        run=registration.run,
        channel=registration.channel,
        **stored_prompt._asdict(),
        response_ids=pack_ids(sample.ids),
        response_logprobs=pack_logprobs(sample.logprobs),
        segments=sample.segments,
        finish_reason=sample.finish_reason or "",
        sampling=msgspec.json.encode(request.sampling).decode(),
        model=generation.model,
        tokenizer=tokenizer,
        request_hash=request_hash,
        conversation=conversation,
        metadata=registration.metadata,
        group_size=registration.group_size,
        deadline=registration.deadline,
        tenant=registration.tenant,
        not_trainable=_untrainable_reason(request, sample),
        created_at=created * 1000,
    )


def count_step(recorded: RecordedStep) -> None:
    """Updates the metrics after a Step was acknowledged."""
    step = recorded.step
    channel = step.channel if step.channel in LABELLED_CHANNELS else "other"
    metrics.steps_published.labels(channel).inc()
    metrics.prompt_tokens.observe(recorded.prompt_tokens)
    metrics.response_tokens.observe(len(step.response_ids) // ID_BYTES)
    if step.not_trainable:
        metrics.not_trainable.inc()


def _untrainable_reason(request: Request, sample: SampledTokens) -> str | None:
    """Why the Step's logprobs cannot be trained on; None if they can."""
    if min(sample.logprobs, default=0.0) <= UNKNOWN_LOGPROB:
        return "the engine gave no logprob for a token"
    if request.forces_tool:
        return "the distribution was changed by tool_choice"
    return untrainable_reason(request.sampling)
