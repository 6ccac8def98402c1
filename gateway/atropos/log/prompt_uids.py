"""Names for groups that are posted, so that those which come together lie together.

A group's partition follows from its prompt_uid, and a request to Kafka carries records of one
partition: eight posts at a time would be eight requests. So uids are drawn before they are needed and
kept by partition; a stretch of groups takes those of one partition, the next stretch another's.
"""

import os
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRETCH = 16
"""Groups. Short, so that who reads partitions side by side finds work in all of them."""
DRAWN = 64
"""Uids at a time: by then, numbers in rows are cheaper than one by one."""
UID_BYTES = 32
SEED, MULTIPLIER = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)
"""Of murmur2, as Kafka's clients have it."""


class Neighbours:
    def __init__(self, partitions: int) -> None:
        self._drawn: list[list[str]] = [[] for _ in range(partitions)]
        self._partition = 0
        self._left = 0

    def draw(self) -> str:
        """A new prompt_uid."""
        if not self._left:
            self._partition, self._left = random.randrange(len(self._drawn)), STRETCH
        self._left -= 1
        drawn = self._drawn[self._partition]
        while not drawn:
            self._draw_more()
        return drawn.pop()

    def _draw_more(self) -> None:
        names = os.urandom(DRAWN * UID_BYTES // 2).hex()
        uids = [names[at : at + UID_BYTES] for at in range(0, len(names), UID_BYTES)]
        words = np.frombuffer(names.encode(), "<u4").reshape(DRAWN, -1)
        for uid, partition in zip(uids, _partitions(words, len(self._drawn)), strict=True):
            self._drawn[partition].append(uid)


def _partitions(words: NDArray[np.uint32], partitions: int) -> list[int]:
    """Where every client of ours puts the records of these keys, each a row of four-byte words."""
    hashed: NDArray[Any] = np.full(len(words), SEED ^ np.uint32(UID_BYTES))
    for word in words.T:
        mixed = word * MULTIPLIER
        mixed = (mixed ^ (mixed >> 24)) * MULTIPLIER
        hashed = hashed * MULTIPLIER ^ mixed
    hashed = (hashed ^ (hashed >> 13)) * MULTIPLIER
    hashed ^= hashed >> 15
    found: list[int] = ((hashed & 0x7FFFFFFF) % partitions).tolist()
    return found
