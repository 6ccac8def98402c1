"""What must go from the log: by trajectory, by tenant or by run.

A Step and a registration name their tenant. Ends, notes and Feedback name the trajectory, and the
prompt_uids of a tenant begin with its name. Decisions of other runs stay, since they say which records
made which weights, but what they call a deleted trajectory is taken from them.
"""

from collections.abc import Iterable
from functools import cached_property

import msgspec

from replay.settings import DeleteSettings
from schemas import Codec, DecidedGroup, Decision, Member, Record, SchemaError

GONE = "deleted"
SEARCHED = 64
"""Names that are looked for in raw bytes; more would take longer than the copy. The fields of records
are compared with all names."""
UNMISTAKABLE = 16
"""Characters from which on a name in raw bytes is no accident; of shorter ones, their length must
stand before them, as Avro writes it."""


class Forbidden:
    def __init__(self, settings: DeleteSettings) -> None:
        self.uids = set(settings.trajectory)
        self._tenant = settings.tenant
        self._scope = f"{settings.tenant}/" if settings.tenant else None
        self._run = settings.of_run

    def learn(self, record: Record) -> None:
        """Notes the trajectories of the tenant."""
        if self._tenant and getattr(record, "tenant", None) == self._tenant:
            self.uids.add(str(getattr(record, "trajectory_uid")))  # noqa: B009

    def has(self, record: Record) -> bool:
        return (
            getattr(record, "trajectory_uid", None) in self.uids
            or (self._run is not None and getattr(record, "run", None) == self._run)
            or (self._tenant is not None and getattr(record, "tenant", None) == self._tenant)
            or self._is_scoped(getattr(record, "prompt_uid", ""))
        )

    def _is_scoped(self, prompt_uid: str) -> bool:
        return self._scope is not None and prompt_uid.startswith(self._scope)

    def scrubbed(self, record: Record) -> Record:
        """A record that stays, without what it calls the trajectories that go."""
        if not isinstance(record, Decision):
            return record
        groups = [self._group(group) for group in record.groups]
        others = self._members(record.others)
        if groups == record.groups and others == record.others:
            return record
        return msgspec.structs.replace(record, groups=groups, others=others)

    def _group(self, group: DecidedGroup) -> DecidedGroup:
        members = self._members(group.members)
        if not self._is_scoped(group.prompt_uid):
            return msgspec.structs.replace(group, members=members)
        return msgspec.structs.replace(group, members=members, prompt_uid=GONE)

    def _members(self, members: Iterable[Member]) -> list[Member]:
        return [
            msgspec.structs.replace(member, trajectory_uid=GONE)
            if member.trajectory_uid in self.uids
            else member
            for member in members
        ]

    @cached_property
    def words(self) -> list[bytes]:
        """What no byte string may hold, once all is learned."""
        names = [uid.encode() for uid in sorted(self.uids)[:SEARCHED]]
        return [n if len(n) >= UNMISTAKABLE else bytes([2 * len(n)]) + n for n in names]

    def has_key(self, key: bytes) -> bool:
        """Of a record whose value tells nothing: `trajectories` has uids as keys, the others have
        prompt_uids."""
        text = key.decode(errors="replace")
        return text in self.uids or self._is_scoped(text)


def decoded(codec: Codec, value: bytes) -> Record | None:
    """None: it is no record of this version."""
    try:
        return codec.decode(value)
    except SchemaError:
        return None
