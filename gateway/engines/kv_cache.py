"""Under which version a call looks up and stores keys and values in an engine's KV cache.

Engines find a cached prefix only under the salt that it was stored with. Usually that is the version of
the weights, and the trainer empties the caches with every update: nothing is sampled from what old
weights computed. With the trainer's `keep_kv` a trajectory keeps the salt of its beginning, so its
later calls find the conversation in the cache, whatever version computed it. Members of a group that
begin under one version share their prompt; one that begins later computes it anew.

What is stored under a salt was computed by that version or a later one: a call never uses a salt newer
than its engine. So the salt bounds what tokens were sampled from, and their segments say so.
"""

from collections.abc import Sequence

import msgspec

from pool.core.versions import Version
from schemas import Segment, Step


def choose_salt(engine: Version, began: Version | None, keep_kv: bool) -> Version:
    """The salt of a call. `began` is the salt of the trajectory's first call. Caches are kept within an
    incarnation of the trainer only."""
    if keep_kv and began is not None and began.incarnation == engine.incarnation:
        return min(began, engine)
    return engine


def mark_kept(segments: Sequence[Segment], salt: Version) -> list[Segment]:
    """The segments of an answer, with the version of the salt where it is older than their own."""
    return [
        msgspec.structs.replace(segment, kv_version=salt.number)
        if segment.incarnation == salt.incarnation and segment.version > salt.number
        else segment
        for segment in segments
    ]


def salt_of(step: Step) -> Version | None:
    """The salt that a recorded Step began with; None if no trainer's weights sampled it."""
    if not step.segments or not step.segments[0].incarnation:
        return None
    return Version(step.segments[0].incarnation, step.segments[0].oldest_version)
