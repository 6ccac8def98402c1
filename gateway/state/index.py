"""Which trajectories exist, according to the topic `trajectories`.

Open ones are kept with their registration, closed ones with just enough to find their End in the log.
"""

import hashlib
import time
from collections import Counter, OrderedDict
from typing import NamedTuple

import msgspec

from gateway.waits import EventPace
from schemas import Position, Registration

REMEMBERED_CLOSED = 500_000
"""Closed trajectories that are known as such."""
FORGET_AFTER = 24 * 3600
"""Seconds after its deadline at which an abandoned trajectory is forgotten here."""


class ClosedTrajectory(NamedTuple):
    """What is kept of a closed trajectory: enough to find its End in the log."""

    begins: Position
    tenant: str


class TrajectoryIndex:
    """A fold of registrations: open trajectories, closed ones, and the number of open ones per
    tenant."""

    def __init__(self) -> None:
        self._open: dict[str, Registration] = {}
        self._open_by_tenant: Counter[str] = Counter()
        self._closed: OrderedDict[bytes, ClosedTrajectory] = OrderedDict()
        self._closing_paces: dict[str, EventPace] = {}
        """How fast the trajectories of tenants close that have met the limit on open ones."""

    def open_registration(self, uid: str) -> Registration | None:
        return self._open.get(uid)

    def closed(self, uid: str) -> ClosedTrajectory | None:
        return self._closed.get(_digest(uid))

    def open_count(self, tenant: str) -> int:
        return self._open_by_tenant[tenant]

    def expected_wait(self, tenant: str) -> float:
        """Seconds until one of the tenant's trajectories closes, judging by the last ones."""
        pace = self._closing_paces.setdefault(tenant, EventPace())
        return pace.expected_wait(time.monotonic())

    def merge(self, record: Registration) -> Registration:
        """Adds a registration that another process may have written; returns what now holds."""
        earlier = self._open.get(record.trajectory_uid)
        merged = record if earlier is None else _merge(earlier, record)
        self.put(merged)
        return merged

    def put(self, record: Registration) -> None:
        """Adds a registration that replaces any earlier one."""
        uid = record.trajectory_uid
        earlier = self._open.pop(uid, None)
        if earlier is not None:
            self._open_by_tenant[earlier.tenant] -= 1
        if record.status is None:
            self._open[uid] = record
            self._open_by_tenant[record.tenant] += 1
            return
        if record.tenant in self._closing_paces:
            self._closing_paces[record.tenant].record(time.monotonic())
        self._closed[_digest(uid)] = ClosedTrajectory(record.begins, record.tenant)
        while len(self._closed) > REMEMBERED_CLOSED:
            self._closed.popitem(last=False)

    def forget_abandoned(self, now: float) -> None:
        """Forgets open trajectories whose deadline passed long ago. `now`: seconds since the epoch."""
        limit = (now - FORGET_AFTER) * 1000
        abandoned = [uid for uid, r in self._open.items() if (r.deadline or limit) < limit]
        for uid in abandoned:
            self._open_by_tenant[self._open.pop(uid).tenant] -= 1


def _merge(earlier: Registration, record: Registration) -> Registration:
    """Combines two registrations. The newer one holds, unless a mere call made it; the Steps begin at
    the earlier of the two offsets."""
    if earlier.begins.partition != record.begins.partition:
        return record
    begins = min(earlier.begins, record.begins)
    if record.implicit and record.status is None:
        return msgspec.structs.replace(earlier, begins=begins, gateway=record.gateway)
    return msgspec.structs.replace(record, begins=begins)


def _digest(uid: str) -> bytes:
    return hashlib.blake2b(uid.encode(), digest_size=12).digest()
