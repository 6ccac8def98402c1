"""Prompts as token ids, and a cache of rendered prompts.

The trajectories of a group begin with the same messages, so rendered prompts are cached, unless the
template depends on more than its input: the clock, or chance.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.dialects.request import Request
from gateway.tokens.cache import LruCache
from schemas.packing import ID_BYTES, pack_ids, unpack_ids

CACHE_BYTES = 32 * 1024 * 1024
BYTES_PER_ID = 36 + ID_BYTES
"""A Python integer and its list entry, and the packed id."""
NONDETERMINISTIC = ("strftime_now", "random", "lipsum")
"""Template functions that give another result every time."""

_encode = msgspec.json.Encoder().encode


class Prompt:
    """A prompt's ids, as a list for engines and packed for Steps. Shared between calls: do not
    modify."""

    def __init__(self, ids: list[int], packed: bytes | None = None) -> None:
        self.ids = ids
        self._packed = packed

    @classmethod
    def continued(cls, packed_prefix: bytes, tail: list[int]) -> "Prompt":
        """An earlier Step's prompt and response, followed by new ids."""
        return cls([*unpack_ids(packed_prefix), *tail], packed_prefix + pack_ids(tail))

    @property
    def packed(self) -> bytes:
        if self._packed is None:
            self._packed = pack_ids(self.ids)
        return self._packed

    def __len__(self) -> int:
        return len(self.ids)


class PromptCache:
    """Renders prompts and caches them. `render` makes the ids of a request's messages."""

    def __init__(
        self,
        render: Callable[[Request], list[int]],
        template: Any,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._render = render
        self._cache: LruCache[bytes, Prompt] = LruCache(cache_bytes, _size)
        self._is_deterministic = not any(word in str(template) for word in NONDETERMINISTIC)

    def get(self, request: Request) -> Prompt:
        if not self._is_deterministic:
            return Prompt(self._render(request))
        key = _encode((request.messages, request.tools, request.template))
        prompt = self._cache.get(key)
        if prompt is None:
            prompt = Prompt(self._render(request))
            self._cache.put(key, prompt)
        return prompt


def _size(key: bytes, prompt: Prompt) -> int:
    return len(key) + BYTES_PER_ID * len(prompt)
