"""Where a call goes on: which earlier answer of the trajectory its messages continue.

Every answer has a hash of the messages up to and including it. A new call computes the same hash
after each assistant message that it brings; the last one that is known is the answer it continues.
The hash leaves out what clients change on the way (ids of tool calls, reasoning, white space around
an answer), since what the model saw is in the Step, not in the message.

The ids themselves are kept in threads. A Step that extends a whole thread becomes its new end, so a
linear conversation of fifty turns is one thread, not fifty prompts.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.dialects.request import Message, Request
from schemas.packing import ID_BYTES, unpack_ids

THREADS = 16
"""Threads that a trajectory remembers. A call that continues a forgotten one stores its prompt in
full and is rendered anew."""
HASH_BYTES = 12
THINKING_ENDS = "</think>"

_encode = msgspec.json.Encoder(order="deterministic").encode


class Chain:
    """The hashes of one call's messages."""

    def __init__(self, request: Request) -> None:
        self._hash = hashlib.blake2b(
            _encode((request.tools, request.template)), digest_size=HASH_BYTES
        )
        self.answers: list[tuple[int, bytes]] = []
        """After how many messages an answer ends, and the hash there."""
        for count, message in enumerate(request.messages, 1):
            self._hash.update(_essence(message))
            if message["role"] == "assistant":
                self.answers.append((count, self._hash.digest()))

    def after(self, answer: Message) -> bytes:
        """The hash of the conversation with one more answer."""
        longer = self._hash.copy()
        longer.update(_essence(answer))
        return longer.digest()


def _essence(message: Message) -> bytes:
    content = message["content"]
    if message["role"] == "assistant":
        content = content.rpartition(THINKING_ENDS)[2].strip()
    return _encode((message["role"], content, _calls(message)))


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = (call["function"] for call in message.get("tool_calls", ()))
    return [(function["name"], _same(function["arguments"])) for function in functions]


def _same(value: Any) -> Any:
    """JavaScript sends 1.0 back as 1."""
    if isinstance(value, dict):
        return {name: _same(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_same(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Thread(msgspec.Struct):
    """A prompt and its response, of the newest Step along a line of Steps."""

    step_id: str
    ids: bytes


class Place(NamedTuple):
    """The end of an answer: so many bytes of a thread."""

    thread: Thread
    length: int


class Continued(NamedTuple):
    """The answer that a call continues."""

    messages: int
    """How many of the call's messages are behind it."""
    ids: bytes
    """Prompt and response as the engine had them, packed."""

    @property
    def last_id(self) -> int:
        return unpack_ids(self.ids[-ID_BYTES:])[0]


class Conversation:
    """The threads of one trajectory."""

    def __init__(self) -> None:
        self._threads: OrderedDict[int, Thread] = OrderedDict()
        self._places: dict[bytes, Place] = {}

    def find(self, chain: Chain) -> Continued | None:
        for messages, digest in reversed(chain.answers):
            place = self._places.get(digest)
            if place is not None and id(place.thread) in self._threads:
                return Continued(messages, place.thread.ids[: place.length])
        return None

    def prompt_of(self, digest: bytes | None, response: bytes) -> bytes:
        """What was asked for the answer with this hash."""
        place = self._places.get(digest or b"")
        return place.thread.ids[: place.length].removesuffix(response) if place else b""

    def contexts(self) -> dict[str, bytes]:
        """What `pool.core.prompts.delta` may refer to: acknowledged Steps only."""
        return {thread.step_id: thread.ids for thread in self._threads.values()}

    def add(self, step_id: str, prompt: bytes, response: bytes, digest: bytes | None) -> None:
        """A Step that the log has."""
        ids = prompt + response
        thread = self._extended(prompt)
        if thread is None:
            thread = Thread(step_id, ids)
            self._threads[id(thread)] = thread
        else:
            thread.step_id, thread.ids = step_id, ids
            self._threads.move_to_end(id(thread))
        if digest is not None:
            self._places[digest] = Place(thread, len(ids))
        while len(self._threads) > THREADS:
            self._forget(self._threads.popitem(last=False)[1])

    def _extended(self, prompt: bytes) -> Thread | None:
        """The thread that this prompt contains from its first id to its last."""
        threads: Sequence[Thread] = [
            thread for thread in self._threads.values() if prompt.startswith(thread.ids)
        ]
        return max(threads, key=lambda thread: len(thread.ids), default=None)

    def _forget(self, thread: Thread) -> None:
        gone = [digest for digest, place in self._places.items() if place.thread is thread]
        for digest in gone:
            del self._places[digest]
