r"""Encodes new text word by word, with a cache: most words of a new prompt occurred before.

A byte-level tokenizer splits text into words with a regular expression and encodes each word
separately. Splitting takes most of its time, so this module splits as well, but only where every
such expression does: after a letter or digit that is followed by a space, a line break or
punctuation (not an apostrophe: some keep `it's` whole), and between punctuation and a space (not a
line break, which some join to punctuation). What lies between two splits is encoded by the
tokenizer itself, once, and cached.

Whether all that holds for a tokenizer is read from its parts and then tried on odd text
(`can_encode_by_word`)."""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers.models import BPE

CACHED_WORDS = 100_000
"""Words in each of two generations; about 20 MB when both are full."""
MAX_CACHED_LENGTH = 64
"""Characters. Longer words hardly occur again."""
_SPACE, _OTHER, _LETTER = r"[ \t\r\n]", r"[^ \t\r\n]", "[A-Za-z0-9]"
_PUNCTUATION = r"!-&(-/:-@\[-`{-~"
_split = re.compile(
    rf"{_SPACE}*['{_PUNCTUATION}]*{_LETTER}++(?=[ \t\r\n{_PUNCTUATION}]|\Z)"
    # Anything else extends to the next space at which splitting is safe.
    rf"|{_SPACE}*{_OTHER}+(?:(?<!{_LETTER})(?:(?=[\r\n])|(?<![\w!-~])){_SPACE}+{_OTHER}*)*"
    rf"|{_SPACE}+"
).findall

Encode = Callable[[str], list[int]]


class WordEncoder:
    """Encodes word by word. `encode` is the tokenizer's own. The cache has two generations: a word
    that is used moves to the new one, and the old one is dropped when the new one is full."""

    def __init__(self, encode: Encode, cached_words: int = CACHED_WORDS) -> None:
        self._encode = encode
        self._cached_words = cached_words
        self._new: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        lookup = self._new.get
        ids: list[int] = []
        for word in _split(text):
            word_ids = lookup(word)
            ids += self._encode_word(word) if word_ids is None else word_ids
        return ids

    def _encode_word(self, word: str) -> list[int]:
        ids = self._old.get(word)
        if ids is None:
            ids = self._encode(word)
        if len(word) <= MAX_CACHED_LENGTH:
            self._new[word] = ids
            if len(self._new) >= self._cached_words:
                self._old, self._new = self._new, {}
        return ids

    def __len__(self) -> int:
        """Number of cached words; those in both generations count twice."""
        return len(self._new) + len(self._old)


def can_encode_by_word(backend: Any, encode: Encode) -> bool:
    """Whether a `tokenizers.Tokenizer` gives the same ids word by word: judged by its
    configuration, then tested on odd texts."""
    if not _is_byte_level_bpe(backend):
        return False
    encoder = WordEncoder(encode)
    return all(encoder.encode(text) == encode(text) for text in _odd_texts())


def _is_byte_level_bpe(backend: Any) -> bool:
    """Whether it is byte-level BPE after a split by regular expression, without a normalizer that could
    change spaces (NFC only composes characters)."""
    model, normalizer = backend.model, _config(backend.normalizer)
    if not isinstance(model, BPE) or model.dropout or normalizer.get("type") not in (None, "NFC"):
        return False
    pre_tokenizer = _config(backend.pre_tokenizer)
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    has_regex = any(step["type"] == "Split" or step.get("use_regex") for step in steps)
    return has_regex and {step["type"] for step in steps} <= {"Split", "ByteLevel", "Digits"}


def _config(component: Any) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if component is not None:
        config = json.loads(component.__getstate__())
    return config


_ODD_WORDS = (
    "a", "it's", "DON'T", "x1", "12345", "3.14", "snake_case", "_", ".", "...", "?!", "]);", "a/",
    "//", "-", "`x`", '"', "'", "é", "e\u0301", "Привет,", "мир", "你好", "世界。", "नमस्ते", "עברית",
    "😀", "👩\u200d💻", "€", "½", "ſ", "\u200b", "\u00a0", "\u3000", "\x00", "\x1c", "\x0b",
)  # fmt: skip
_GAPS = ("", " ", "  ", "   ", "\n", "\n\n", " \n", "\n  ", "\t", "\t ", "\r\n")
_SUFFIXES = ("a", "It's", "'s", "1", ".", "/", "_", "é", "你", "\u3000", "\u0301", "😀")
_RANDOM_TEXTS = 200


def _odd_texts() -> Iterator[str]:
    yield from map("".join, itertools.product(_ODD_WORDS, _GAPS, _SUFFIXES))
    yield from map("".join, itertools.product(_GAPS, _ODD_WORDS, _GAPS[:2]))
    chance = random.Random(0)
    for _ in range(_RANDOM_TEXTS):
        parts = chance.choices((*_ODD_WORDS, *_GAPS, *_GAPS), k=chance.randrange(2, 40))
        yield "".join(parts)
        yield chance.randbytes(chance.randrange(1, 60)).decode("utf-8", "replace")
