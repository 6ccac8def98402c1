"""Text to ids, and not twice: tokenizing 2 KB takes half a millisecond, more than all else together.

All calls of an agent begin with the same system prompt. A template puts special tokens around each
message, and a tokenizer splits text at these first, so the pieces between them can be encoded one by
one and remembered. Whether that holds for a tokenizer is tried when it is loaded; where it does not,
whole texts are remembered. A piece that is new is encoded word by word, if the tokenizer allows it.
"""

import re
from typing import Any

from gateway.tokens.cache import Memory
from gateway.tokens.word_encoder import Words, fits

REMEMBERED_BYTES = 32 * 1024 * 1024
"""About a quarter of it is text, the rest ids."""
BYTES_PER_ID = 36
"""A Python integer and its place in a list."""
SHORT = 16
"""Characters. Pieces so short have a word or two, which are remembered anyway."""
PROBES = ("a", " b", "\n", "user\nHello, world", "x ", " 1 ", "é\n\n")


class Encoder:
    """Encodes with a `tokenizers.Tokenizer`; nothing is added to the text."""

    def __init__(self, backend: Any, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._backend = backend
        self._remembered: Memory[str, list[int]] = Memory(remembered_bytes, _size)
        self._words: Words | None = None
        added = backend.get_added_tokens_decoder().items()
        self._markers = {token.content: number for number, token in added if _is_marker(token)}
        self._split = re.compile(f"({_any_of(self._markers)})").split
        others = [token.content for _, token in added if token.content not in self._markers]
        self._has_other = re.compile(_any_of(others)).search if others else None
        self._by_pieces = bool(self._markers) and all(
            self._in_pieces(text) == self._encode(text) for text in self._probe_texts()
        )
        if self._by_pieces and fits(backend, self._encode):
            self._words = Words(self._encode)

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
                ids += self._encode_new(piece) if len(piece) < SHORT else self._recall(piece)
        return ids

    def _recall(self, text: str) -> list[int]:
        ids = self._remembered.get(text)
        if ids is None:
            ids = self._encode_new(text)
            self._remembered.put(text, ids)
        return ids

    def _encode_new(self, text: str) -> list[int]:
        # Tokens that were added to the vocabulary may lie across words.
        if self._words is None or (self._has_other and self._has_other(text)):
            return self._encode(text)
        return self._words.encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def _size(text: str, ids: list[int]) -> int:
    return len(text) + BYTES_PER_ID * len(ids)


def _is_marker(token: Any) -> bool:
    """A token that stands for itself, whatever is around it."""
    alone = not (token.lstrip or token.rstrip or token.single_word)
    return alone and (token.special or not token.normalized)


def _any_of(texts: Any) -> str:
    """Where one begins with another, a tokenizer finds the longer one."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
