r"""New text to ids, word by word: most words of a new prompt were seen before, in another one.

A tokenizer of bytes cuts text into words by a regular expression and encodes each by itself. Finding
the words takes it most of its time, so this module cuts as well, but only where every such expression
does: behind a letter or digit if a space, a line break or punctuation follows (not an apostrophe:
some keep `it's` whole), and between punctuation and a space (not a line break: punctuation may take
it along). What lies between two cuts is encoded by the tokenizer itself, once, and remembered.

Whether all that holds for a tokenizer is read from its parts and then tried on odd text (`fits`).
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers.models import BPE

REMEMBERED = 100_000
"""Words of each of two generations; about 20 MB when both are full."""
LONGEST = 64
"""Characters. What is longer will hardly come again."""
_SPACE, _OTHER, _LETTER = r"[ \t\r\n]", r"[^ \t\r\n]", "[A-Za-z0-9]"
_PUNCTUATION = r"!-&(-/:-@\[-`{-~"
_cut = re.compile(
    rf"{_SPACE}*['{_PUNCTUATION}]*{_LETTER}++(?=[ \t\r\n{_PUNCTUATION}]|\Z)"
    # What the line above does not know goes on to the next space that may be cut.
    rf"|{_SPACE}*{_OTHER}+(?:(?<!{_LETTER})(?:(?=[\r\n])|(?<![\w!-~])){_SPACE}+{_OTHER}*)*"
    rf"|{_SPACE}+"
).findall

Encode = Callable[[str], list[int]]


class Words:
    """`encode` is the tokenizer's own. A word that is used now and then moves from the old generation
    to the new one; one that is not goes with the old."""

    def __init__(self, encode: Encode, remembered: int = REMEMBERED) -> None:
        self._encode = encode
        self._remembered = remembered
        self._new: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        known = self._new.get
        ids: list[int] = []
        for word in _cut(text):
            found = known(word)
            ids += self._recall(word) if found is None else found
        return ids

    def _recall(self, word: str) -> list[int]:
        ids = self._old.get(word)
        if ids is None:
            ids = self._encode(word)
        if len(word) <= LONGEST:
            self._new[word] = ids
            if len(self._new) >= self._remembered:
                self._old, self._new = self._new, {}
        return ids

    def __len__(self) -> int:
        """How many words are remembered, at most twice if they are in both generations."""
        return len(self._new) + len(self._old)


def fits(backend: Any, encode: Encode) -> bool:
    """Whether a `tokenizers.Tokenizer` can be used word by word."""
    if not _is_bytes_by_expression(backend):
        return False
    words = Words(encode)
    return all(words.encode(text) == encode(text) for text in _odd_texts())


def _is_bytes_by_expression(backend: Any) -> bool:
    """Byte-level BPE behind a regular expression, on text that is not changed before, except that
    characters are composed, which no space takes part in."""
    model, normalizer = backend.model, _part(backend.normalizer)
    if not isinstance(model, BPE) or model.dropout or normalizer.get("type") not in (None, "NFC"):
        return False
    cutter = _part(backend.pre_tokenizer)
    cutters = cutter.get("pretokenizers", [cutter])
    cuts = any(part["type"] == "Split" or part.get("use_regex") for part in cutters)
    return cuts and {part["type"] for part in cutters} <= {"Split", "ByteLevel", "Digits"}


def _part(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return found


_ODD_WORDS = (
    "a", "it's", "DON'T", "x1", "12345", "3.14", "snake_case", "_", ".", "...", "?!", "]);", "a/",
    "//", "-", "`x`", '"', "'", "é", "e\u0301", "Привет,", "мир", "你好", "世界。", "नमस्ते", "עברית",
    "😀", "👩\u200d💻", "€", "½", "ſ", "\u200b", "\u00a0", "\u3000", "\x00", "\x1c", "\x0b",
)  # fmt: skip
_GAPS = ("", " ", "  ", "   ", "\n", "\n\n", " \n", "\n  ", "\t", "\t ", "\r\n")
_BEHIND = ("a", "It's", "'s", "1", ".", "/", "_", "é", "你", "\u3000", "\u0301", "😀")
_RANDOM_TEXTS = 200


def _odd_texts() -> Iterator[str]:
    yield from map("".join, itertools.product(_ODD_WORDS, _GAPS, _BEHIND))
    yield from map("".join, itertools.product(_GAPS, _ODD_WORDS, _GAPS[:2]))
    chance = random.Random(0)
    for _ in range(_RANDOM_TEXTS):
        parts = chance.choices((*_ODD_WORDS, *_GAPS, *_GAPS), k=chance.randrange(2, 40))
        yield "".join(parts)
        yield chance.randbytes(chance.randrange(1, 60)).decode("utf-8", "replace")
