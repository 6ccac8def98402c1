"""Prompt uids for posted groups, chosen so that groups that arrive together share a partition.

A group's partition follows from its prompt_uid, and each partition of a request to Kafka is a batch of
its own: eight posts at a time would be eight batches. So uids are generated ahead of time and kept by
partition; a run of consecutive groups uses those of one partition, the next run those of another.
"""

import os
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUPS_IN_A_ROW = 16
"""Consecutive groups of one partition: few, so that parallel readers find work in every partition."""
GENERATED_AT_ONCE = 64
"""Enough uids that hashing them with numpy is cheaper than one by one."""
UID_BYTES = 32
SEED, MULTIPLIER = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)
"""Constants of murmur2, the hash of Kafka's default partitioner."""


class PromptUids:
    def __init__(self, partitions: int) -> None:
        self._by_partition: list[list[str]] = [[] for _ in range(partitions)]
        self._partition = 0
        self._remaining = 0

    def next_uid(self) -> str:
        if not self._remaining:
            self._partition, self._remaining = (
                random.randrange(len(self._by_partition)),
                GROUPS_IN_A_ROW,
            )
        self._remaining -= 1
        uids = self._by_partition[self._partition]
        while not uids:
            self._generate()
        return uids.pop()

    def _generate(self) -> None:
        digits = os.urandom(GENERATED_AT_ONCE * UID_BYTES // 2).hex()
        uids = [digits[at : at + UID_BYTES] for at in range(0, len(digits), UID_BYTES)]
        words = np.frombuffer(digits.encode(), "<u4").reshape(GENERATED_AT_ONCE, -1)
        for uid, partition in zip(uids, _partitions(words, len(self._by_partition)), strict=True):
            self._by_partition[partition].append(uid)


def _partitions(words: NDArray[np.uint32], partitions: int) -> list[int]:
    """The partition of each key, as Kafka's default partitioner chooses it. Every row of `words` is a
    key, as four-byte words."""
    hashed: NDArray[Any] = np.full(len(words), SEED ^ np.uint32(UID_BYTES))
    for word in words.T:
        mixed = word * MULTIPLIER
        mixed = (mixed ^ (mixed >> 24)) * MULTIPLIER
        hashed = hashed * MULTIPLIER ^ mixed
    hashed = (hashed ^ (hashed >> 13)) * MULTIPLIER
    hashed ^= hashed >> 15
    numbers: list[int] = ((hashed & 0x7FFFFFFF) % partitions).tolist()
    return numbers
