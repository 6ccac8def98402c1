"""One LLM call of a trajectory, from its messages to its Step in the log.

A call runs in a task of its own: clients come and go, the generation stays for a while. What a client
is told at the end, it is told after the Step is durable. A retry joins the running call, or takes the
place of one that was cancelled or could not be written, under the same index and id.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator

import msgspec

from gateway import metrics
from gateway.calls.answers import add_details, answer
from gateway.calls.generation import Generator, Outcome
from gateway.dialects.request import Answer, Delta, Request, not_trainable
from gateway.engines.wire import UNKNOWN_LOGPROB, Sample
from gateway.errors import ApiError, TooLarge
from gateway.state.conversation import Chain
from gateway.state.log import Log
from gateway.state.trajectories import Trajectories
from gateway.state.trajectory import Trajectory, Written
from gateway.tokens.prompts import Prompt
from pool.core.prompts import encode_prompt
from schemas import Step, StepNote
from schemas.packing import ID_BYTES, pack_ids, pack_logprobs

log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that a generation goes on without a client: a retry may be on its way."""
CHANNELS = ("train", "val")
"""Channels with a metric of their own; agents may name any, and a label must not be theirs."""
IN_A_THREAD = 200_000
"""Bytes of a body whose rendering would hold all other calls up."""


class Recorder(msgspec.Struct):
    """What calls need of the rest of the gateway."""

    generator: Generator
    log: Log
    trajectories: Trajectories
    max_prompt_tokens: int | None = None


class Call:
    """`start` begins it; `task` gives its Answer."""

    def __init__(
        self,
        recorder: Recorder,
        trajectory: Trajectory,
        request: Request,
        request_hash: bytes,
        size: int,
    ) -> None:
        self.step_id = str(uuid.uuid4())
        self.created = int(time.time())
        self.trajectory = trajectory
        self.request = request
        self.request_hash = request_hash
        self.listeners = 0
        self.task: asyncio.Task[Answer]
        self._recorder = recorder
        self._size = size
        self._place = trajectory.reserve_index()
        self._deltas: list[Delta] = []
        self._news = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self.written: Written | None = None
        self._unwritten: tuple[Step, bytes, Answer] | None = None

    def start(self) -> "Call":
        self._deltas = self._deltas if self._unwritten else []
        self.task = asyncio.create_task(self._run())
        self.trajectory.running.add(self)
        self.task.add_done_callback(self._ended)
        return self

    def _ended(self, task: "asyncio.Task[Answer]") -> None:
        self.trajectory.running.discard(self)
        if self._grace is not None:
            self._grace.cancel()
        if task.cancelled() or task.exception() is not None:
            self.trajectory.keep_unfinished(self)
            self._tell_failure(None if task.cancelled() else task.exception())
        self._news.set()

    def _tell_failure(self, error: BaseException | None) -> None:
        """Its kind only: the words may quote the request, and go to the client."""
        kind = "it was cancelled" if error is None else type(error).__name__
        is_theirs = isinstance(error, ApiError) and error.status < 500
        log.log(
            logging.INFO if is_theirs else logging.WARNING,
            "a call failed: %s",
            kind,
            extra=self.ids,
        )

    @property
    def ids(self) -> dict[str, str]:
        registration = self.trajectory.registration
        return {
            "trajectory_uid": registration.trajectory_uid,
            "prompt_uid": registration.prompt_uid,
            "step_id": self.step_id,
            "run": registration.run,
        }

    def served_model(self) -> str:
        """What a stream calls the model from its first event on."""
        return (self._recorder.generator.engines.models() or [self.request.model])[0]

    # Clients

    def join(self) -> None:
        self.listeners += 1
        if self._grace is not None:
            self._grace.cancel()

    def leave(self) -> None:
        """Its client is gone."""
        self.listeners -= 1
        if not self.listeners and not self.task.done():
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(GRACE, self._abandon)

    def _abandon(self) -> None:
        """Ends the generation; a Step that is being written goes on to its end, which is near."""
        if self._unwritten is None:
            self.task.cancel()

    async def ended(self, gone: "asyncio.Task[None]") -> None:
        """Returns when the call has ended, or its client is gone."""
        gone.add_done_callback(self._tell_news)
        while not (self.task.done() or gone.done()):
            self._news.clear()
            await self._news.wait()

    def _tell_news(self, _: "asyncio.Task[None]") -> None:
        self._news.set()

    async def follow(self, gone: "asyncio.Task[None]") -> AsyncIterator[Delta]:
        """All of the stream, from its beginning, as it comes; until the client is gone."""
        gone.add_done_callback(self._tell_news)
        told = 0
        while not gone.done():
            while told < len(self._deltas) and not gone.done():
                yield self._deltas[told]
                told += 1
            if self.task.done():
                return
            if not gone.done():
                self._news.clear()
                await self._news.wait()

    def _emit(self, delta: Delta) -> None:
        if not self._deltas:
            metrics.first_token_seconds.observe(time.time() - self.created)
        self._deltas.append(delta)
        self._news.set()

    # The call itself

    async def _run(self) -> Answer:
        if self._unwritten is None:
            self._unwritten = await self._make()
        step, prompt, told = self._unwritten
        await self._recorder.log.write(step)
        self.written = self.trajectory.add(step, prompt)
        _count(self.written)
        if not self.listeners:
            await self.mark_undelivered()
        return told

    async def _make(self) -> tuple[Step, bytes, Answer]:
        chain = Chain(self.request)
        registering = self._register()
        if registering is not None and chain.answers:
            # Another process may know what the call continues.
            await self._registered(registering)
        prompt = await self._prompt(chain)
        generator = self._recorder.generator
        emit = self._emit if self.request.stream else None
        outcome = await generator.generate(self.request, prompt.ids, self.trajectory.engine, emit)
        self.trajectory.engine = outcome.engine
        told = self._answer(prompt, outcome)
        if registering is not None:
            await self._registered(registering)
        step = self._step(prompt.packed, outcome, chain.after(told.message()))
        return step, prompt.packed, told

    def _register(self) -> "asyncio.Task[None] | None":
        """While the engine works: the Step waits for the registration, its text need not."""
        if self.trajectory.registered:
            return None
        return self._recorder.trajectories.start_registering(self.trajectory)

    async def _registered(self, registering: "asyncio.Task[None]") -> None:
        """A write that failed is not tried again; one that came too late is."""
        await asyncio.shield(registering)
        await self._recorder.trajectories.ensure_registered(self.trajectory)

    async def _prompt(self, chain: Chain) -> Prompt:
        if self._size > IN_A_THREAD:
            prompt, kind = await asyncio.to_thread(self._render, chain)
        else:
            prompt, kind = self._render(chain)
        limit = self._recorder.max_prompt_tokens
        if limit is not None and len(prompt) > limit:
            raise TooLarge(
                f"the prompt has {len(prompt):,} tokens, {limit:,} are allowed",
                code="context_length_exceeded",
            )
        metrics.prompt_continuity.labels(kind).inc()
        return prompt

    def _render(self, chain: Chain) -> tuple[Prompt, str]:
        """The prompt, and how it relates to earlier Steps."""
        renderer = self._recorder.generator.renderer
        continued = self.trajectory.conversation.find(chain)
        if continued is not None:
            tail = renderer.continuation(self.request, continued.messages, continued.last_id)
            if tail is not None:
                return Prompt.continued(continued.ids, tail), "continued"
        rewritten = chain.answers and self.trajectory.steps
        return renderer.prompt(self.request), "rewritten" if rewritten else "first"

    def _answer(self, prompt: Prompt, outcome: Outcome) -> Answer:
        sample = outcome.sample
        found = answer(self.step_id, self.created, outcome.model, outcome.told, sample, len(prompt))
        renderer = self._recorder.generator.renderer
        add_details(found, self.request, renderer, sample, prompt.ids)
        return found

    def _step(self, prompt: bytes, outcome: Outcome, conversation: bytes) -> Step:
        sample, registration = outcome.sample, self.trajectory.registration
        stored = encode_prompt(prompt, self.trajectory.conversation.contexts())
        return Step(
            step_id=self.step_id,
            trajectory_uid=registration.trajectory_uid,
            prompt_uid=registration.prompt_uid,
            step_index=self.trajectory.index_of(self._place),
            run=registration.run,
            channel=registration.channel,
            **stored._asdict(),
            response_ids=pack_ids(sample.ids),
            response_logprobs=pack_logprobs(sample.logprobs),
            segments=sample.segments,
            finish_reason=sample.finish_reason or "",
            sampling=msgspec.json.encode(self.request.sampling).decode(),
            model=outcome.model,
            tokenizer=self._recorder.generator.renderer.fingerprint,
            request_hash=self.request_hash,
            conversation=conversation,
            metadata=registration.metadata,
            group_size=registration.group_size,
            deadline=registration.deadline,
            tenant=registration.tenant,
            not_trainable=_not_trainable(self.request, sample),
            created_at=self.created * 1000,
        )

    async def mark_undelivered(self) -> None:
        """The answer is in the log, and its client did not get it."""
        if self.written is not None and self.written.delivered:
            self.written.delivered = False
            metrics.undelivered.inc()
            await self._recorder.log.write(note(self.written.step, delivered=False))

    async def mark_delivered(self) -> None:
        """A retry may have joined while the note was on its way to the log."""
        if self.written is not None and not self.written.delivered:
            self.written.delivered = True
            await self._recorder.log.write(note(self.written.step, delivered=True))


def note(step: Step, delivered: bool) -> StepNote:
    return StepNote(
        note_id=str(uuid.uuid4()),
        step_id=step.step_id,
        trajectory_uid=step.trajectory_uid,
        prompt_uid=step.prompt_uid,
        run=step.run,
        channel=step.channel,
        delivered=delivered,
        created_at=int(time.time() * 1000),
    )


def _not_trainable(request: Request, sample: Sample) -> str | None:
    if min(sample.logprobs, default=0.0) <= UNKNOWN_LOGPROB:
        return "the engine gave no logprob for a token"
    return not_trainable(request.sampling, forced=request.forces_tool)


def _count(written: Written) -> None:
    step = written.step
    metrics.steps_published.labels(step.channel if step.channel in CHANNELS else "other").inc()
    metrics.prompt_tokens.observe(written.prompt_tokens)
    metrics.response_tokens.observe(len(step.response_ids) // ID_BYTES)
    if step.not_trainable:
        metrics.not_trainable.inc()
