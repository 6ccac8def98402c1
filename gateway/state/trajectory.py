"""The state of one open trajectory. All of it is in the log, or is about calls that still run."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gateway.state.conversation import Conversation
from pool.core.prompts import BrokenPrompt, full_prompt
from schemas import Registration, Step, StepNote, TrajectoryEnd
from schemas.packing import ID_BYTES

if TYPE_CHECKING:
    from gateway.calls.call import Call
    from gateway.state.log import StepsRecord

Value = TypeVar("Value")

REMEMBERED_CALLS = 64
"""Answers kept for a client that asks again; retries come within minutes."""


class Written(msgspec.Struct):
    """A Step that the log has, as far as a retry needs it."""

    step: Step
    prompt_tokens: int
    delivered: bool = True


class Trajectory:
    """`registration` is what the log's newest says; `end` is set when it is closed."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.registered = False
        """The log has the registration, and no other process had one before it."""
        self.wishes: dict[str, Any] = {}
        """Fields of the registration that an agent set, and did not leave to the defaults."""
        self.registering: asyncio.Task[None] | None = None
        self.conversation = Conversation()
        self.running: set[Call] = set()
        self.end: TrajectoryEnd | None = None
        self.closing = asyncio.Lock()
        """Held while an End waits for running calls and is written: no call may begin."""
        self.engine: str | None = None
        """The one that had its last call."""
        self.last_used = 0.0
        self._next_index = 0
        self._moved_by = 0
        self._steps: set[str] = set()
        self._written: OrderedDict[bytes, Written] = OrderedDict()
        self._unfinished: OrderedDict[bytes, Call] = OrderedDict()

    @property
    def uid(self) -> str:
        return self.registration.trajectory_uid

    @property
    def is_closed(self) -> bool:
        return self.end is not None or self.registration.status is not None

    @property
    def steps(self) -> int:
        """How many the log has, as far as this process knows."""
        return len(self._steps)

    def reserve_index(self) -> int:
        """A place in the order of calls; `index_of` gives its number when the Step is written."""
        index, self._next_index = self._next_index, self._next_index + 1
        return index - self._moved_by

    def index_of(self, place: int) -> int:
        return place + self._moved_by

    def move_behind(self, records: "Iterable[StepsRecord]") -> None:
        """Another process had the trajectory before: what was reserved here comes after its Steps."""
        reserved, self._next_index = self._next_index, 0
        self.restore(records)
        self._moved_by = self._next_index
        self._next_index += reserved

    def has_step(self, step_id: str) -> bool:
        return step_id in self._steps

    def add(self, step: Step, prompt: bytes) -> Written:
        """Takes a Step that the log has."""
        self._steps.add(step.step_id)
        self._next_index = max(self._next_index, step.step_index + 1)
        self.conversation.add(step.step_id, prompt, step.response_ids, step.conversation)
        written = Written(step, len(prompt) // ID_BYTES)
        _remember(self._written, step.request_hash, written)
        self._unfinished.pop(step.request_hash, None)
        return written

    def written(self, request_hash: bytes) -> Written | None:
        """The answer to an equal request, if there is one in the log."""
        return self._written.get(request_hash)

    def prompt_of(self, step: Step) -> bytes:
        """Its packed prompt, if its conversation is still remembered."""
        return self.conversation.prompt_of(step.conversation, step.response_ids)

    def running_call(self, request_hash: bytes) -> "Call | None":
        calls = [call for call in self.running if call.request_hash == request_hash]
        # One without a client has lost it to the very retry that now comes.
        return min(calls, key=lambda call: call.listeners, default=None)

    def keep_unfinished(self, call: "Call") -> None:
        """A call that was cancelled or could not be written: a retry takes its place."""
        _remember(self._unfinished, call.request_hash, call)

    def unfinished(self, request_hash: bytes) -> "Call | None":
        return self._unfinished.pop(request_hash, None)

    def restore(self, records: "Iterable[StepsRecord]") -> None:
        """Rebuilds the state from what `steps` holds of the trajectory."""
        contexts: dict[str, bytes] = {}
        for record in records:
            if isinstance(record, Step) and record.step_id not in self._steps:
                self._restore_step(record, contexts)
            elif isinstance(record, StepNote):
                self._restore_note(record)
            elif isinstance(record, TrajectoryEnd) and self.end is None:
                self.end = record

    def _restore_step(self, step: Step, contexts: dict[str, bytes]) -> None:
        try:
            prompt = full_prompt(step, contexts)
        except BrokenPrompt:
            # Numbering goes on; later Steps simply do not refer to this one.
            self._steps.add(step.step_id)
            self._next_index = max(self._next_index, step.step_index + 1)
            return
        contexts[step.step_id] = prompt + step.response_ids
        self.add(step, prompt)

    def _restore_note(self, note: StepNote) -> None:
        for written in self._written.values():
            if written.step.step_id == note.step_id:
                written.delivered = note.delivered


def _remember(memory: "OrderedDict[bytes, Value]", key: bytes, value: Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > REMEMBERED_CALLS:
        memory.popitem(last=False)
