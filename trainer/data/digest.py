"""A name for the contents of a batch: equal bits, equal name.

It covers what a step is computed from: of every trajectory the ids, which of them train, the logprobs,
versions and temperatures of their sampling, reward and advantage. Groups are hashed one by one and
put together in the order of the Decision, so it does not matter how many ranks shared them. Of several
ranks one thing may differ: `batch_std` adds the rewards up in another order.
"""

import hashlib
import struct

import numpy as np

from trainer.algorithm.advantages import Total, here
from trainer.data.batch import Batch
from trainer.data.sample import Sample

BYTES = 32


def digest(batch: Batch, total: Total = here) -> str:
    """BLAKE2b in hexadecimal, of all ranks together; every rank has to call it."""
    groups = {sample.group: hashlib.blake2b(digest_size=BYTES) for sample in batch.samples}
    for sample, advantage in zip(batch.samples, batch.advantages, strict=True):
        _add(groups[sample.group], sample, advantage)
    # Ranks only add floats up, and each group lies on one of them: bytes survive that.
    own = np.zeros((batch.groups, BYTES), np.float64)
    for place, group in groups.items():
        own[place] = np.frombuffer(group.digest(), np.uint8)
    of_all = total(own.ravel()).astype(np.uint8)
    return hashlib.blake2b(of_all.tobytes(), digest_size=BYTES).hexdigest()


def _add(group: "hashlib.blake2b", sample: Sample, advantage: float) -> None:
    uid = sample.trajectory_uid.encode()
    # Lengths go before what they measure, so that no two batches spell the same bytes.
    group.update(struct.pack("<q", len(uid)) + uid)
    group.update(struct.pack("<ddq", sample.reward, advantage, len(sample.rows)))
    for row in sample.rows:
        group.update(struct.pack("<q", len(row)))
        for values in (row.ids, row.trainable, row.behaviour, row.versions, row.temperatures):
            group.update(np.ascontiguousarray(values).data)
        group.update(struct.pack("<?", row.advantages is not None))
        if row.advantages is not None:
            group.update(np.ascontiguousarray(row.advantages).data)
