"""How environments share the groups of one run, as each of them states it.

An environment registers its trajectories with its name, and with its share if it has one:

    {"environment": "math", "steplog_share": {"weight": 2, "minimum": 0.25}}

Every environment gets its minimum, and the rest is divided by weight. The statement is part of each
trajectory's metadata, so the log has it: gateways and trainers need no settings of their own, and a
restart finds it again. Trajectories without a name belong to one nameless environment.
"""

from collections.abc import Collection
from typing import Annotated, NamedTuple

import msgspec


class EnvironmentShare(NamedTuple):
    environment: str = ""
    weight: float = 1.0
    minimum: float = 0.0
    """Smallest share of a batch."""
    is_stated: bool = False


NAMELESS = EnvironmentShare()


class _StatedShare(msgspec.Struct):
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    minimum: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class _Metadata(msgspec.Struct):
    environment: str = ""
    steplog_share: _StatedShare | None = None


_DECODER = msgspec.json.Decoder(_Metadata)


def read_share(metadata: str) -> EnvironmentShare:
    """The share that a trajectory's metadata states. Agents may write anything into their metadata."""
    try:
        found = _DECODER.decode(metadata)
    except (msgspec.DecodeError, RecursionError):
        return NAMELESS
    stated = found.steplog_share
    if stated is None:
        return EnvironmentShare(found.environment)
    return EnvironmentShare(found.environment, stated.weight, stated.minimum, True)


def divide(shares: Collection[EnvironmentShare]) -> dict[str, float]:
    """Each environment's part of the whole, by name. Minimums that exceed the whole are scaled down."""
    minimums = sum(share.minimum for share in shares)
    scale = max(1.0, minimums)
    rest = 1 - minimums / scale
    weights = sum(share.weight for share in shares)
    return {
        share.environment: share.minimum / scale + rest * share.weight / weights for share in shares
    }
