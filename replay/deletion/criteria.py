"""Decides which records are deleted: by trajectory, by tenant or by run.

Steps and registrations name their tenant. Ends, notes and Feedback name the trajectory, and the
prompt_uids of a tenant begin with its name. Decisions of other runs stay, since they tell which records
made which weights, but the names of deleted trajectories are removed from them.
"""

from collections.abc import Iterable
from functools import cached_property

import msgspec

from replay.settings import DeleteSettings
from schemas import Codec, DecidedGroup, Decision, Member, Record, SchemaError

REPLACEMENT = "deleted"
"""Put in place of the name of a deleted trajectory or prompt."""
MAX_SEARCHED_NAMES = 64
"""Names searched in raw bytes; searching more would take longer than the copy. The fields of decoded
records are compared with all names."""
MIN_UNIQUE_BYTES = 16
"""A name this long cannot occur in raw bytes by chance. A shorter one is searched together with its
length before it, as Avro writes strings."""


class DeletionCriteria:
    """The trajectories, tenant and run to delete."""

    def __init__(self, settings: DeleteSettings) -> None:
        self.uids = set(settings.trajectory)
        self._tenant = settings.tenant
        self._prompt_prefix = f"{settings.tenant}/" if settings.tenant else None
        self._run = settings.of_run

    def add_trajectory_of_tenant(self, record: Record) -> None:
        """Adds the record's trajectory if it is the tenant's."""
        if self._tenant and getattr(record, "tenant", None) == self._tenant:
            self.uids.add(str(getattr(record, "trajectory_uid")))  # noqa: B009

    def match(self, record: Record) -> bool:
        return (
            getattr(record, "trajectory_uid", None) in self.uids
            or (self._run is not None and getattr(record, "run", None) == self._run)
            or (self._tenant is not None and getattr(record, "tenant", None) == self._tenant)
            or self._is_prompt_of_tenant(getattr(record, "prompt_uid", ""))
        )

    def _is_prompt_of_tenant(self, prompt_uid: str) -> bool:
        return self._prompt_prefix is not None and prompt_uid.startswith(self._prompt_prefix)

    def scrub(self, record: Record) -> Record:
        """A record that stays, without the names of deleted trajectories; the same object if it names
        none."""
        if not isinstance(record, Decision):
            return record
        groups = [self._scrub_group(group) for group in record.groups]
        others = self._scrub_members(record.others)
        if groups == record.groups and others == record.others:
            return record
        return msgspec.structs.replace(record, groups=groups, others=others)

    def _scrub_group(self, group: DecidedGroup) -> DecidedGroup:
        members = self._scrub_members(group.members)
        if not self._is_prompt_of_tenant(group.prompt_uid):
            return msgspec.structs.replace(group, members=members)
        return msgspec.structs.replace(group, members=members, prompt_uid=REPLACEMENT)

    def _scrub_members(self, members: Iterable[Member]) -> list[Member]:
        return [
            msgspec.structs.replace(member, trajectory_uid=REPLACEMENT)
            if member.trajectory_uid in self.uids
            else member
            for member in members
        ]

    @cached_property
    def byte_patterns(self) -> list[bytes]:
        """Byte strings that no copied message may contain. Read it when all trajectories are known."""
        names = [uid.encode() for uid in sorted(self.uids)[:MAX_SEARCHED_NAMES]]
        return [n if len(n) >= MIN_UNIQUE_BYTES else bytes([2 * len(n)]) + n for n in names]

    def match_key(self, key: bytes) -> bool:
        """For a message that cannot be decoded. Keys are trajectory_uids in `trajectories` and
        prompt_uids in the other topics."""
        text = key.decode(errors="replace")
        return text in self.uids or self._is_prompt_of_tenant(text)


def decode_or_none(codec: Codec, value: bytes) -> Record | None:
    """None if the value is not a record of this version."""
    try:
        return codec.decode(value)
    except SchemaError:
        return None
