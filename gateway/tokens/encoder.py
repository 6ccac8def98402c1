"""Encodes text into ids, with a cache: tokenizing 2 KB takes half a millisecond, more than the rest
of a call.

All calls of an agent begin with the same system prompt. A template puts special tokens around each
message, and a tokenizer splits text at these first, so the pieces between them can be encoded and
cached one by one. Whether that holds for a tokenizer is tested when it is loaded; if it does not,
whole texts are cached. A piece that is not in the cache is encoded word by word, if the tokenizer
allows it.
"""

import re
from typing import Any

from gateway.tokens.cache import LruCache
from gateway.tokens.word_encoder import WordEncoder, can_encode_by_word

CACHE_BYTES = 32 * 1024 * 1024
"""About a quarter of it is text, the rest are ids."""
BYTES_PER_ID = 36
"""A Python integer and its list entry."""
MIN_CACHED_LENGTH = 16
"""Characters. Shorter pieces have a word or two, which the word encoder caches anyway."""
PROBES = ("a", " b", "\n", "user\nHello, world", "x ", " 1 ", "é\n\n")


class Encoder:
    """Encodes with a `tokenizers.Tokenizer`, without adding special tokens."""

    def __init__(self, backend: Any, cache_bytes: int = CACHE_BYTES) -> None:
        self._backend = backend
        self._cache: LruCache[str, list[int]] = LruCache(cache_bytes, _size)
        self._word_encoder: WordEncoder | None = None
        added = backend.get_added_tokens_decoder().items()
        self._markers = {token.content: number for number, token in added if _is_marker(token)}
        self._split = re.compile(f"({_any_of(self._markers)})").split
        others = [token.content for _, token in added if token.content not in self._markers]
        self._find_other = re.compile(_any_of(others)).search if others else None
        self._is_splittable = bool(self._markers) and all(
            self._encode_pieces(text) == self._encode(text) for text in self._probe_texts()
        )
        if self._is_splittable and can_encode_by_word(backend, self._encode):
            self._word_encoder = WordEncoder(self._encode)

    def encode(self, text: str) -> list[int]:
        return self._encode_pieces(text) if self._is_splittable else list(self._encode_cached(text))

    def _probe_texts(self) -> list[str]:
        pairs = [f"{left}{m}{right}" for m in self._markers for left in PROBES for right in PROBES]
        return [*pairs, *self._markers, "".join(self._markers)]

    def _encode_pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split(text):
            marker = self._markers.get(piece)
            if marker is not None:
                ids.append(marker)
            elif piece:
                ids += (
                    self._encode_uncached(piece)
                    if len(piece) < MIN_CACHED_LENGTH
                    else self._encode_cached(piece)
                )
        return ids

    def _encode_cached(self, text: str) -> list[int]:
        ids = self._cache.get(text)
        if ids is None:
            ids = self._encode_uncached(text)
            self._cache.put(text, ids)
        return ids

    def _encode_uncached(self, text: str) -> list[int]:
        # Tokens that were added to the vocabulary may span several words.
        if self._word_encoder is None or (self._find_other and self._find_other(text)):
            return self._encode(text)
        return self._word_encoder.encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def _size(text: str, ids: list[int]) -> int:
    return len(text) + BYTES_PER_ID * len(ids)


def _is_marker(token: Any) -> bool:
    """Whether a token is split off first, whatever text is around it."""
    stands_alone = not (token.lstrip or token.rstrip or token.single_word)
    return stands_alone and (token.special or not token.normalized)


def _any_of(texts: Any) -> str:
    """A pattern of any of the texts. The longest comes first, as tokenizers prefer it."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
