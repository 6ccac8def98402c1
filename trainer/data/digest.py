"""Digest of a batch: equal contents, bit for bit, have equal digests.

It covers everything that a step is computed from: of every trajectory the token ids, which of them are
trained, the logprobs, versions and temperatures of sampling, reward and advantage. Groups are hashed
one by one and combined in the order of the Decision.
"""

import hashlib
import struct

import numpy as np

from trainer.data.batch import Batch
from trainer.data.sample import Sample

BYTES = 32


def digest(batch: Batch) -> str:
    """BLAKE2b in hexadecimal."""
    groups = {sample.group: hashlib.blake2b(digest_size=BYTES) for sample in batch.samples}
    for sample, advantage in zip(batch.samples, batch.advantages, strict=True):
        _add_sample(groups[sample.group], sample, advantage)
    digests = np.zeros((batch.groups, BYTES), np.uint8)  # of withdrawn groups: zeros
    for index, group in groups.items():
        digests[index] = np.frombuffer(group.digest(), np.uint8)
    return hashlib.blake2b(digests.tobytes(), digest_size=BYTES).hexdigest()


def _add_sample(group: "hashlib.blake2b", sample: Sample, advantage: float) -> None:
    uid = sample.trajectory_uid.encode()
    # Each field is preceded by its length, so that different batches never hash the same bytes.
    group.update(struct.pack("<q", len(uid)) + uid)
    group.update(struct.pack("<ddq", sample.reward, advantage, len(sample.rows)))
    for row in sample.rows:
        group.update(struct.pack("<q", len(row)))
        for values in (row.ids, row.trainable, row.behaviour, row.versions, row.temperatures):
            group.update(np.ascontiguousarray(values).data)
        group.update(struct.pack("<?", row.advantages is not None))
        if row.advantages is not None:
            group.update(np.ascontiguousarray(row.advantages).data)
