"""One LLM call of a trajectory, from its messages to its acknowledged Step.

A call runs in a task of its own and outlives its client for a while. Its answer is given out only after
the Step is durable. A retry joins the running call, or restarts one that was cancelled or could not be
written, under the same index and step_id.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator

import msgspec

from gateway import metrics
from gateway.calls.answers import add_token_details, make_answer
from gateway.calls.generation import Generation, Generator
from gateway.calls.step import count_step, make_step
from gateway.dialects.request import Answer, AnswerDelta, Request
from gateway.engines.affinity import CacheAffinity
from gateway.errors import CONTEXT_OVERFLOW, ApiError, TooLarge
from gateway.state.conversation import HashChain
from gateway.state.log import StepsLog
from gateway.state.notes import delivery_note
from gateway.state.trajectories import Trajectories
from gateway.state.trajectory import RecordedStep, TrajectoryState
from gateway.tokens.prompts import Prompt
from schemas import Step

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long a generation continues without a client: a retry may be on its way."""
RENDER_IN_THREAD_BYTES = 200_000
"""Rendering a larger body would block all other calls, so it runs in a thread."""


class CallContext(msgspec.Struct):
    """The parts of the gateway that calls use."""

    generator: Generator
    log: StepsLog
    trajectories: Trajectories
    max_prompt_tokens: int | None = None


class LlmCall:
    """One call. `start` begins it; `task` returns its Answer."""

    def __init__(
        self,
        context: CallContext,
        trajectory: TrajectoryState,
        request: Request,
        chain: HashChain,
        request_hash: bytes,
        body_bytes: int,
    ) -> None:
        self.step_id = str(uuid.uuid4())
        self.created = int(time.time())
        self.trajectory = trajectory
        self.request = request
        self.request_hash = request_hash
        self.listeners = 0
        self.task: asyncio.Task[Answer]
        self.recorded: RecordedStep | None = None
        self._context = context
        self._chain = chain
        self._body_bytes = body_bytes
        self._reserved_index = trajectory.reserve_index()
        self._deltas: list[AnswerDelta] = []
        self._changed = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self._unwritten: tuple[Step, bytes, Answer] | None = None
        """The Step, its packed prompt and the answer, once generated; kept for a retry of the write."""
        self._was_delivered = False

    def start(self) -> "LlmCall":
        self._deltas = self._deltas if self._unwritten else []
        self.task = asyncio.create_task(self._run())
        self.trajectory.running.add(self)
        self.task.add_done_callback(self._on_done)
        return self

    def _on_done(self, task: "asyncio.Task[Answer]") -> None:
        self.trajectory.running.discard(self)
        if self._grace is not None:
            self._grace.cancel()
        if task.cancelled() or task.exception() is not None:
            self.trajectory.keep_unfinished(self)
            self._log_failure(None if task.cancelled() else task.exception())
        self._changed.set()

    def _log_failure(self, error: BaseException | None) -> None:
        """Logs the error's type only: its message may quote the request, and goes to the client."""
        kind = "it was cancelled" if error is None else type(error).__name__
        is_client_error = isinstance(error, ApiError) and error.status < 500
        level = logging.INFO if is_client_error else logging.WARNING
        log.log(level, "LLM call failed: %s", kind, extra=self.ids)

    @property
    def ids(self) -> dict[str, str]:
        registration = self.trajectory.registration
        return {
            "trajectory_uid": registration.trajectory_uid,
            "prompt_uid": registration.prompt_uid,
            "step_id": self.step_id,
            "run": registration.run,
        }

    @property
    def unwritten_step(self) -> Step | None:
        """The Step of a call that could not be written, as far as this process knows. The log may have
        it all the same: the acknowledgement may have been lost."""
        return self._unwritten[0] if self._unwritten and self.recorded is None else None

    def served_model(self) -> str:
        """The model name that a stream shows from its first event on."""
        return (self._context.generator.engines.models() or [self.request.model])[0]

    # Clients

    def join(self) -> None:
        """Adds a client."""
        self.listeners += 1
        if self._grace is not None:
            self._grace.cancel()

    def leave(self) -> None:
        """Removes a client; after the last one the call runs on for `GRACE_S`."""
        self.listeners -= 1
        if not self.listeners and not self.task.done():
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(GRACE_S, self._abandon)

    def _abandon(self) -> None:
        """Cancels the generation. A Step that is already being written is left to finish."""
        if self._unwritten is None:
            self.task.cancel()

    async def wait(self, disconnect: "asyncio.Task[None]") -> None:
        """Returns when the call is done, or its client has disconnected."""
        disconnect.add_done_callback(self._notify)
        while not (self.task.done() or disconnect.done()):
            self._changed.clear()
            await self._changed.wait()

    def _notify(self, _: "asyncio.Task[None]") -> None:
        self._changed.set()

    async def follow(self, disconnect: "asyncio.Task[None]") -> AsyncIterator[AnswerDelta]:
        """The whole stream from its beginning, as it grows; ends when the client disconnects."""
        disconnect.add_done_callback(self._notify)
        sent = 0
        while not disconnect.done():
            while sent < len(self._deltas) and not disconnect.done():
                yield self._deltas[sent]
                sent += 1
            if self.task.done():
                return
            if not disconnect.done():
                self._changed.clear()
                await self._changed.wait()

    def _emit(self, delta: AnswerDelta) -> None:
        if not self._deltas:
            metrics.first_token_seconds.observe(time.time() - self.created)
        self._deltas.append(delta)
        self._changed.set()

    # The call itself

    async def _run(self) -> Answer:
        if self._unwritten is None:
            self._unwritten = await self._generate_or_overflow()
        step, prompt, answer = self._unwritten
        await self._context.log.write(step)
        self.recorded = self.trajectory.add(step, prompt)
        count_step(self.recorded)
        if not self.listeners:
            await self.mark_undelivered()
        return answer

    async def _generate_or_overflow(self) -> tuple[Step, bytes, Answer]:
        """Generates, and notes in the log if the prompt does not fit into the model's context."""
        try:
            return await self._generate()
        except ApiError as error:
            if error.code == CONTEXT_OVERFLOW:
                await self._note_overflow()
            raise

    async def _note_overflow(self) -> None:
        """Without an answer to train, or after another overflow, there is nothing to note."""
        trajectory, last = self.trajectory, self.trajectory.last_recorded_step()
        if last is not None and not trajectory.overflowed:
            note = delivery_note(last.step, delivered=last.delivered, overflowed=True)
            await self._context.log.write(note)
            trajectory.overflowed = True
            metrics.overflows.inc()

    async def _generate(self) -> tuple[Step, bytes, Answer]:
        registering = self._start_registering()
        if registering is not None and self._chain.answers:
            # Another process may have the answer that this call continues.
            await self._wait_until_registered(registering)
        prompt = await self._prompt()
        generator = self._context.generator
        emit = self._emit if self.request.stream else None
        trajectory = self.trajectory
        affinity = CacheAffinity(
            trajectory.registration.prompt_uid, trajectory.engine, trajectory.salt
        )
        generation = await generator.generate(self.request, prompt.ids, affinity, emit)
        self.trajectory.engine = generation.engine
        answer = self._answer(prompt, generation)
        if registering is not None:
            await self._wait_until_registered(registering)
        step = self._step(prompt.packed, generation, self._chain.after(answer.message()))
        return step, prompt.packed, answer

    def _start_registering(self) -> "asyncio.Task[None] | None":
        """Writes the registration while the engine works; only the Step has to wait for it."""
        if self.trajectory.registered:
            return None
        return self._context.trajectories.registrar.start_registering(self.trajectory)

    async def _wait_until_registered(self, registering: "asyncio.Task[None]") -> None:
        """Fails if this write failed; writes again if the registration changed meanwhile."""
        await asyncio.shield(registering)
        await self._context.trajectories.registrar.ensure_registered(self.trajectory)

    async def _prompt(self) -> Prompt:
        if self._body_bytes > RENDER_IN_THREAD_BYTES:
            prompt, kind = await asyncio.to_thread(self._render)
        else:
            prompt, kind = self._render()
        limit = self._context.max_prompt_tokens
        if limit is not None and len(prompt) > limit:
            raise TooLarge(
                f"The prompt has {len(prompt):,} tokens; this gateway allows {limit:,} "
                "(--max-prompt-tokens). Shorten the conversation.",
                code=CONTEXT_OVERFLOW,
            )
        metrics.prompt_continuity.labels(kind).inc()
        return prompt

    def _render(self) -> tuple[Prompt, str]:
        """The prompt, and how it relates to earlier Steps."""
        renderer = self._context.generator.renderer
        continued = self.trajectory.conversation.find(self._chain)
        if continued is not None:
            tail = renderer.continuation(self.request, continued.messages, continued.last_id)
            if tail is not None:
                return Prompt.continued(continued.ids, tail), "continued"
        is_rewritten = self._chain.answers and self.trajectory.step_count
        return renderer.prompt(self.request), "rewritten" if is_rewritten else "first"

    def _answer(self, prompt: Prompt, generation: Generation) -> Answer:
        sample = generation.sample
        answer = make_answer(
            self.step_id, self.created, generation.model, generation.parsed, sample, len(prompt)
        )
        renderer = self._context.generator.renderer
        add_token_details(answer, self.request, renderer, sample, prompt.ids)
        return answer

    def _step(self, prompt: bytes, generation: Generation, conversation: bytes) -> Step:
        return make_step(
            self.trajectory,
            self.request,
            generation,
            step_id=self.step_id,
            step_index=self.trajectory.step_index(self._reserved_index),
            prompt=prompt,
            conversation=conversation,
            tokenizer=self._context.generator.renderer.fingerprint,
            request_hash=self.request_hash,
            created=self.created,
        )

    async def mark_undelivered(self) -> None:
        """Notes in the log that no client received the answer."""
        if self.recorded is not None and self.recorded.delivered and not self._was_delivered:
            self.recorded.delivered = False
            metrics.undelivered.inc()
            await self._context.log.write(delivery_note(self.recorded.step, delivered=False))

    async def mark_delivered(self) -> None:
        """Withdraws that note: a retry may have joined while it was being written."""
        self._was_delivered = True
        if self.recorded is not None and not self.recorded.delivered:
            self.recorded.delivered = True
            await self._context.log.write(delivery_note(self.recorded.step, delivered=True))
