"""Finds the earlier answer of a trajectory that a call's messages continue.

Every answer has a hash of the messages up to and including it. A new call computes the same hash after
each of its assistant messages; the last hash that is known identifies the answer it continues. The hash
leaves out what clients change (ids of tool calls, reasoning, white space around an answer): what the
model saw is in the Step, not in the message.

Token ids are kept in threads. A Step that extends a whole thread becomes its new end, so a linear
conversation of fifty turns is one thread, not fifty prompts.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.dialects.request import Message, Request
from schemas.packing import ID_BYTES, unpack_ids

THREADS = 16
"""Threads kept per trajectory. A call that continues an evicted one is rendered from scratch and stores
its full prompt."""
HASH_BYTES = 12
THINKING_ENDS = "</think>"

_encode = msgspec.json.Encoder(order="deterministic").encode


class HashChain:
    """The hashes of one call's messages, after each assistant message."""

    def __init__(self, request: Request) -> None:
        self._hash = hashlib.blake2b(
            _encode((request.tools, request.template)), digest_size=HASH_BYTES
        )
        self.answers: list[tuple[int, bytes]] = []
        """Number of messages up to an assistant message, and the hash at that point."""
        for count, message in enumerate(request.messages, 1):
            self._hash.update(_normalized(message))
            if message["role"] == "assistant":
                self.answers.append((count, self._hash.digest()))

    def request_hash(self, request: Request, dialect: str) -> bytes:
        """The same for requests that ask the same, however their JSON is written: the order of keys
        does not count, nor do fields without effect, such as Codex's client_metadata."""
        longer = self._hash.copy()
        longer.update(
            _encode(
                (
                    dialect,
                    request.prompt,
                    request.sampling,
                    request.tool_choice,
                    request.single_tool_call,
                    request.model,
                    request.stream,
                    request.include_usage,
                    request.logprobs,
                    request.top_logprobs,
                    request.token_ids,
                )
            )
        )
        return longer.digest()

    def after(self, answer: Message) -> bytes:
        """The hash after one more answer."""
        longer = self._hash.copy()
        longer.update(_normalized(answer))
        return longer.digest()


def _normalized(message: Message) -> bytes:
    """The parts of a message that clients send back unchanged."""
    content = message["content"]
    if message["role"] == "assistant":
        content = content.rpartition(THINKING_ENDS)[2].strip()
    return _encode((message["role"], content, _calls(message)))


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = (call["function"] for call in message.get("tool_calls", ()))
    return [(function["name"], _with_integers(function["arguments"])) for function in functions]


def _with_integers(value: Any) -> Any:
    """Whole floats as integers: JavaScript sends 1.0 back as 1."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class TokenThread(msgspec.Struct):
    """Packed prompt and response of the newest Step in a line of Steps, each extending the one
    before."""

    step_id: str
    ids: bytes


class AnswerEnd(NamedTuple):
    """Where an answer ends: after `length` bytes of a thread."""

    thread: TokenThread
    length: int


class ContinuedAnswer(NamedTuple):
    """The answer that a call continues."""

    messages: int
    """How many of the call's messages end with this answer."""
    ids: bytes
    """Prompt and response of that Step, packed."""

    @property
    def last_id(self) -> int:
        return unpack_ids(self.ids[-ID_BYTES:])[0]


class Conversation:
    """The threads of one trajectory."""

    def __init__(self) -> None:
        self._threads: OrderedDict[int, TokenThread] = OrderedDict()
        self._answer_ends: dict[bytes, AnswerEnd] = {}

    def find(self, chain: HashChain) -> ContinuedAnswer | None:
        """The latest answer among a call's messages that this trajectory has given."""
        for messages, digest in reversed(chain.answers):
            end = self._answer_ends.get(digest)
            if end is not None and id(end.thread) in self._threads:
                return ContinuedAnswer(messages, end.thread.ids[: end.length])
        return None

    def prompt_of(self, digest: bytes | None, response: bytes) -> bytes:
        """The packed prompt of the answer with this hash; empty if it is not remembered."""
        end = self._answer_ends.get(digest or b"")
        return end.thread.ids[: end.length].removesuffix(response) if end else b""

    def contexts(self) -> dict[str, bytes]:
        """The contexts that a delta-coded prompt may refer to: those of acknowledged Steps only."""
        return {thread.step_id: thread.ids for thread in self._threads.values()}

    def add(self, step_id: str, prompt: bytes, response: bytes, digest: bytes | None) -> None:
        """Adds a Step that the log has acknowledged."""
        ids = prompt + response
        thread = self._extended_thread(prompt)
        if thread is None:
            thread = TokenThread(step_id, ids)
            self._threads[id(thread)] = thread
        else:
            thread.step_id, thread.ids = step_id, ids
            self._threads.move_to_end(id(thread))
        if digest is not None:
            self._answer_ends[digest] = AnswerEnd(thread, len(ids))
        while len(self._threads) > THREADS:
            self._forget(self._threads.popitem(last=False)[1])

    def _extended_thread(self, prompt: bytes) -> TokenThread | None:
        """The longest thread that is a prefix of this prompt."""
        threads: Sequence[TokenThread] = [
            thread for thread in self._threads.values() if prompt.startswith(thread.ids)
        ]
        return max(threads, key=lambda thread: len(thread.ids), default=None)

    def _forget(self, thread: TokenThread) -> None:
        digests = [digest for digest, end in self._answer_ends.items() if end.thread is thread]
        for digest in digests:
            del self._answer_ends[digest]
