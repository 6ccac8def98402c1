"""Text to ids, and not twice: tokenizing 2 KB takes half a millisecond, more than all else together.

The trajectories of a group begin with the same prompt, and all calls of an agent with the same
system prompt. A template puts special tokens around each message, and a tokenizer splits text at
these first, so the pieces between them can be encoded one by one and remembered. Whether that holds
for a tokenizer is tried when it is loaded; where it does not, whole texts are remembered.
"""

import re
from collections import OrderedDict
from threading import Lock
from typing import Any

REMEMBERED_BYTES = 64 * 1024 * 1024
"""About a quarter of it is text, the rest ids."""
BYTES_PER_ID = 36
"""A Python integer and its place in a list."""
SHORT = 16
"""Characters. Encoding so few is as quick as remembering them."""
PROBES = ("a", " b", "\n", "user\nHello, world", "x ", " 1 ", "é\n\n")


class Encoder:
    """Encodes with a `tokenizers.Tokenizer`; nothing is added to the text."""

    def __init__(self, backend: Any, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._backend = backend
        self._room = remembered_bytes
        self._lock = Lock()
        self._remembered: OrderedDict[str, list[int]] = OrderedDict()
        self._markers = _markers(backend)
        self._split = re.compile(f"({'|'.join(map(re.escape, self._markers))})").split
        self._by_pieces = bool(self._markers) and all(
            self._in_pieces(text) == self._encode(text) for text in self._probe_texts()
        )

    def encode(self, text: str) -> list[int]:
        return self._in_pieces(text) if self._by_pieces else list(self._recall(text))

    def _probe_texts(self) -> list[str]:
        pairs = [f"{left}{m}{right}" for m in self._markers for left in PROBES for right in PROBES]
        return [*pairs, *self._markers, "".join(self._markers)]

    def _in_pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split(text):
            marker = self._markers.get(piece)
            if marker is not None:
                ids.append(marker)
            elif piece:
                ids += self._encode(piece) if len(piece) < SHORT else self._recall(piece)
        return ids

    def _recall(self, text: str) -> list[int]:
        """Long prompts are rendered in threads, so the memory has a lock; encoding does without."""
        with self._lock:
            ids = self._remembered.pop(text, None)
            if ids is not None:
                self._remembered[text] = ids  # now the newest
                return ids
        ids = self._encode(text)
        with self._lock:
            self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: list[int]) -> None:
        if text in self._remembered:
            return  # another thread was quicker
        self._remembered[text] = ids
        self._room -= _size(text, ids)
        while self._room < 0:
            self._room += _size(*self._remembered.popitem(last=False))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def _size(text: str, ids: list[int]) -> int:
    return len(text) + BYTES_PER_ID * len(ids)


def _markers(backend: Any) -> dict[str, int]:
    """Special tokens that stand for themselves, whatever is around them."""
    return {
        token.content: number
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special and not (token.lstrip or token.rstrip or token.single_word)
    }
