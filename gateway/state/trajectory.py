"""The state of one trajectory in memory. All of it can be read back from the log, except running
calls."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import msgspec

from gateway.engines.kv_cache import salt_of
from gateway.state.conversation import Conversation
from gateway.state.log import StepsRecord
from pool.core.prompts import BrokenPrompt, full_prompt
from pool.core.trajectories import status_of
from pool.core.versions import Version
from schemas import Registration, Step, StepNote, TrajectoryEnd
from schemas.packing import ID_BYTES
from schemas.records import Status

Value = TypeVar("Value")

REMEMBERED_CALLS = 64
"""Answers kept for a client that retries; retries come within minutes."""


class TrackedCall(Protocol):
    """What a trajectory needs to know about a call (`gateway.calls.call.LlmCall`)."""

    task: "asyncio.Task[Any]"
    request_hash: bytes
    listeners: int

    @property
    def unwritten_step(self) -> Step | None: ...


class RecordedStep(msgspec.Struct):
    """A Step that the log has acknowledged, with what a retry of its request needs."""

    step: Step
    prompt_tokens: int
    delivered: bool = True


class TrajectoryState:
    """One trajectory. `registration` is the newest one; `end` is set when the trajectory is closed."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.registered = False
        """The log has the registration, and no other process had one before it."""
        self.explicit_fields: dict[str, Any] = {}
        """Fields of the registration that an agent set, as opposed to defaults."""
        self.registering: asyncio.Task[None] | None = None
        self.conversation = Conversation()
        self.running: set[TrackedCall] = set()
        self.end: TrajectoryEnd | None = None
        self.closing = asyncio.Lock()
        """Held while an End waits for running calls and is written: no call may begin."""
        self.engine: str | None = None
        """URL of the engine that served the last call."""
        self.salt: Version | None = None
        """The salt of the first call under the newest incarnation (`gateway.engines.kv_cache`)."""
        self.overflowed = False
        """The log says that the last call did not fit into the model's context."""
        self.last_used = 0.0
        self.read_at = time.monotonic()
        """When its records were last read from the log; other processes may have added more since."""
        self._next_index = 0
        self._index_shift = 0
        self._response_lengths: dict[str, int] = {}
        """Tokens of each Step's response, by step_id."""
        self._recorded: OrderedDict[bytes, RecordedStep] = OrderedDict()
        self._unfinished: OrderedDict[bytes, TrackedCall] = OrderedDict()

    @property
    def uid(self) -> str:
        return self.registration.trajectory_uid

    @property
    def is_closed(self) -> bool:
        return self.end is not None or self.registration.status is not None

    @property
    def status(self) -> Status | None:
        """How it ended; None while it is open."""
        if self.end is None:
            return self.registration.status
        return status_of(self.end, self.overflowed)

    @property
    def step_count(self) -> int:
        """Steps in the log, as far as this process knows."""
        return len(self._response_lengths)

    def reserve_index(self) -> int:
        """Reserves a place in the order of calls; `step_index` turns it into the Step's index."""
        index, self._next_index = self._next_index, self._next_index + 1
        return index - self._index_shift

    def step_index(self, reserved: int) -> int:
        """The index of a reserved place, as of now: `adopt_earlier` may still shift it."""
        return reserved + self._index_shift

    def adopt_earlier(self, records: Iterable[StepsRecord]) -> None:
        """Takes over the Steps that another process wrote before; indices reserved here follow them."""
        reserved, self._next_index = self._next_index, 0
        self.restore(records)
        self._index_shift = self._next_index
        self._next_index += reserved

    def has_step(self, step_id: str) -> bool:
        return step_id in self._response_lengths

    def response_length(self, step_id: str) -> int:
        """Tokens of a Step's response."""
        return self._response_lengths[step_id]

    def add(self, step: Step, prompt: bytes) -> RecordedStep:
        """Adds a Step that the log has acknowledged. `prompt` is its full prompt, packed."""
        self._count(step)
        self.conversation.add(step.step_id, prompt, step.response_ids, step.conversation)
        recorded = RecordedStep(step, len(prompt) // ID_BYTES)
        _remember(self._recorded, step.request_hash, recorded)
        if not self._awaits_another(step):
            self._unfinished.pop(step.request_hash, None)
        return recorded

    def _awaits_another(self, step: Step) -> bool:
        """Whether an equal request left another Step, which could not be written."""
        call = self._unfinished.get(step.request_hash)
        unwritten = call.unwritten_step if call else None
        return unwritten is not None and unwritten.step_id != step.step_id

    def last_recorded_step(self) -> RecordedStep | None:
        return next(reversed(self._recorded.values()), None)

    def recorded_step(self, request_hash: bytes) -> RecordedStep | None:
        """The Step that answered an equal request, if the log has one."""
        return self._recorded.get(request_hash)

    def prompt_of(self, step: Step) -> bytes:
        """The packed prompt of a Step; empty if its conversation is not remembered any more."""
        return self.conversation.prompt_of(step.conversation, step.response_ids)

    def running_call(self, request_hash: bytes) -> TrackedCall | None:
        """The running call of an equal request, preferably one whose client is gone: it is the one
        that the client retries."""
        calls = [call for call in self.running if call.request_hash == request_hash]
        return min(calls, key=lambda call: call.listeners, default=None)

    def keep_unfinished(self, call: TrackedCall) -> None:
        """Remembers a call that was cancelled or could not be written, for a retry to restart."""
        _remember(self._unfinished, call.request_hash, call)

    def pop_unfinished(self, request_hash: bytes) -> TrackedCall | None:
        return self._unfinished.pop(request_hash, None)

    def pop_unwritten(self, request_hash: bytes) -> TrackedCall | None:
        """Like `pop_unfinished`, but only a call that has been generated."""
        call = self._unfinished.get(request_hash)
        return self.pop_unfinished(request_hash) if call and call.unwritten_step else None

    def unwritten_steps(self) -> list[Step]:
        """Steps that could not be written, as far as this process knows."""
        steps = (call.unwritten_step for call in self._unfinished.values())
        return [step for step in steps if step is not None]

    def restore(self, records: Iterable[StepsRecord]) -> None:
        """Rebuilds the state from the trajectory's records in `steps`."""
        contexts: dict[str, bytes] = {}
        for record in records:
            if isinstance(record, Step):
                self._restore_step(record, contexts)
            elif isinstance(record, StepNote):
                self._restore_note(record)
            elif isinstance(record, TrajectoryEnd) and self.end is None:
                self.end = record

    def _restore_step(self, step: Step, contexts: dict[str, bytes]) -> None:
        try:
            prompt = full_prompt(step, contexts)
        except BrokenPrompt:
            # Numbering continues; later Steps do not refer to this one.
            self._count(step)
            return
        contexts[step.step_id] = prompt + step.response_ids
        if not self.has_step(step.step_id):
            self.add(step, prompt)

    def _count(self, step: Step) -> None:
        self._response_lengths[step.step_id] = len(step.response_ids) // ID_BYTES
        salt = salt_of(step)
        if salt is not None and (self.salt is None or self.salt.incarnation < salt.incarnation):
            self.salt = salt
        self._next_index = max(self._next_index, step.step_index + 1)
        self.overflowed = False

    def _restore_note(self, note: StepNote) -> None:
        self.overflowed = self.overflowed or note.overflowed
        for recorded in self._recorded.values():
            if recorded.step.step_id == note.step_id:
                recorded.delivered = note.delivered


def _remember(memory: "OrderedDict[bytes, Value]", key: bytes, value: Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > REMEMBERED_CALLS:
        memory.popitem(last=False)
