"""The ids of a prompt, and of prompts that were rendered before.

The trajectories of a group begin with the same messages. What the template and the tokenizer make of
them is remembered, unless the template looks at more than it is given: the clock, or chance.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.dialects.request import Request
from gateway.tokens.cache import Memory
from schemas.packing import ID_BYTES, pack_ids, unpack_ids

REMEMBERED_BYTES = 32 * 1024 * 1024
BYTES_PER_ID = 36 + ID_BYTES
"""A Python integer and its place in a list; then packed."""
CHANGING = ("strftime_now", "random", "lipsum")
"""What a template can use that gives something else every time."""

_encode = msgspec.json.Encoder().encode


class Prompt:
    """Ids as engines take them and, packed, as Steps have them. Shared: nobody changes them."""

    def __init__(self, ids: list[int], packed: bytes | None = None) -> None:
        self.ids = ids
        self._packed = packed

    @classmethod
    def continued(cls, before: bytes, tail: list[int]) -> "Prompt":
        return cls([*unpack_ids(before), *tail], before + pack_ids(tail))

    @property
    def packed(self) -> bytes:
        if self._packed is None:
            self._packed = pack_ids(self.ids)
        return self._packed

    def __len__(self) -> int:
        return len(self.ids)


class Prompts:
    """`render` makes the prompt of a request's messages."""

    def __init__(
        self,
        render: Callable[[Request], list[int]],
        template: Any,
        remembered_bytes: int = REMEMBERED_BYTES,
    ) -> None:
        self._render = render
        self._memory: Memory[bytes, Prompt] = Memory(remembered_bytes, _size)
        self._changes = any(word in str(template) for word in CHANGING)

    def of(self, request: Request) -> Prompt:
        if self._changes:
            return Prompt(self._render(request))
        key = _encode((request.messages, request.tools, request.template))
        prompt = self._memory.get(key)
        if prompt is None:
            prompt = Prompt(self._render(request))
            self._memory.put(key, prompt)
        return prompt


def _size(key: bytes, prompt: Prompt) -> int:
    return len(key) + BYTES_PER_ID * len(prompt)
