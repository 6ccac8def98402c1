"""Sends one version to some engines: pause, send, confirm, resume; and reports the result.

If an engine dies, the others do not lose the version, only time: they form a new group, and the weights
are sent once more. An engine is resumed only with a complete version that it has confirmed.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from pool.core.versions import Version
from trainer.weights.engine import EngineCallFailed, EngineControl
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import total_bytes
from trainer.weights.transfer_group import (
    COLLECTIVE,
    EngineMember,
    PhaseTimes,
    TransferGroup,
    TransferIncomplete,
)
from trainer.weights.transport import Transport, TransportFailed

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineFailure(msgspec.Struct, frozen=True):
    url: str
    phase: str
    reason: str


class SyncReport(msgspec.Struct, frozen=True):
    """The result of sending a version."""

    version: str
    engines: tuple[str, ...] = ()
    """URLs of the engines that have the version and serve it."""
    failures: tuple[EngineFailure, ...] = ()
    seconds: dict[str, float] = {}
    """Seconds by phase."""
    bytes: int = 0
    """Bytes sent over all passes; a broadcast counts once, however many engines receive it."""
    passes: int = 0
    """How often the weights were read and sent."""

    @property
    def is_complete(self) -> bool:
        """Whether every reachable engine has the version, and there is at least one."""
        return bool(self.engines)

    def __str__(self) -> str:
        text = f"{len(self.engines)} engines have version {self.version}"
        failures = (f"{f.url} failed in phase {f.phase} ({f.reason})" for f in self.failures)
        return "; ".join((text, *failures))


class VersionSync:
    """Sends one version to some engines."""

    def __init__(self, version: Version, settings: WeightsSettings, transport: Transport) -> None:
        self._version = version
        self._settings = settings
        self._transport = transport
        self._passes = 0
        self._bytes = 0
        self._times = PhaseTimes()
        self._urls: list[str] = []
        self._serving: set[str] = set()
        self._failures: dict[str, EngineFailure] = {}

    def report(self) -> SyncReport:
        return SyncReport(
            version=str(self._version),
            engines=tuple(url for url in self._urls if url in self._serving),
            failures=tuple(self._failures.values()),
            seconds=dict(self._times.seconds),
            bytes=self._bytes,
            passes=self._passes,
        )

    def find_members(self, urls: list[str]) -> list[EngineMember]:
        """The engines that need the version, by their present state."""
        self._urls = urls
        engines = [EngineControl(url) for url in urls]
        states = self._each(
            "look", engines, lambda engine: engine.read_state(self._settings.weights_look_s)
        )
        members = []
        for engine, state in states:
            # An engine is left paused only after a failure, by any trainer.
            member = EngineMember(engine, state, has_open_update=state.is_paused)
            if self._needs(member):
                members.append(member)
        return members

    def choose_adapters(self, members: list[EngineMember], rank: int) -> list[EngineMember]:
        """Finds out which engines take LoRA adapters of this rank; the others get the whole model."""

        def look(engine: EngineControl) -> int | None:
            largest = engine.largest_adapter(self._settings.weights_start_s)
            if largest is not None and largest < rank:
                raise EngineCallFailed(
                    engine.url,
                    "look",
                    f"it takes adapters up to rank {largest}, but lora_rank is {rank}: restart it "
                    f"with --max-lora-rank {rank} or the next larger rank that vLLM allows",
                    answered=True,
                )
            return largest

        largest = dict(self._each("look", [member.engine for member in members], look))
        known = [member for member in members if member.engine in largest]
        for member in known:
            member.takes_adapter = largest[member.engine] is not None
        return known

    def _needs(self, member: EngineMember) -> bool:
        engine, state = member.engine, member.state
        if state.version is None or state.version < self._version:
            return True
        if state.version > self._version:
            reason = f"it has the newer version {state.version}: another trainer has taken over"
            self._fail(engine.url, "look", reason)
        elif state.is_paused:
            self._resume([member])
        else:
            self._serving.add(engine.url)
        return False

    def pause(self, members: list[EngineMember]) -> list[EngineMember]:
        keeping = {member.engine.url for member in members if self._keeps_kv(member)}
        timeout = self._settings.weights_pause_s
        return self._phase("pause", members, lambda e: e.pause(timeout, e.url in keeping))

    def _keeps_kv(self, member: EngineMember) -> bool:
        """Only over updates within an incarnation: what another one left is not in the order of its
        versions, and an engine without a label may hold anything."""
        version = member.state.version
        is_ours = version is not None and version.incarnation == self._version.incarnation
        return self._settings.keep_kv and is_ours

    def send_to(self, group: TransferGroup) -> TransferGroup | None:
        """Sends until every member has the version or is known to have failed. Returns the group if all
        remaining members are in one, so that the next version can use it again."""
        waiting, intact = [group], []
        while waiting:
            group = waiting.pop()
            if self._attempt(group):
                intact.append(group)
            else:
                waiting += self._regroup(group)
        if len(intact) == 1:
            return intact[0]
        for group in intact:
            group.close()
        return None

    def _attempt(self, group: TransferGroup) -> bool:
        """Sends once; True if no member failed. Members that have the version resume at once."""
        error: Exception | None = None
        earlier_passes = group.source.passes
        try:
            group.send(str(self._version), self._transport, self._times)
        except (TransferIncomplete, TransportFailed) as caught:
            error = caught
            group.close()
            group.source.complete_pass()
        except BaseException:
            group.close()
            raise
        if group.source.passes > earlier_passes:
            self._passes += 1
            self._bytes += total_bytes(group.source)
        self._serve(group.finished)
        self._assign_failures(group, error)
        return error is None

    def _assign_failures(self, group: TransferGroup, error: Exception | None) -> None:
        """Decides which members failed by their own fault: one that cannot be reached, and one that
        failed in a phase where it depends on no other. Errors of the others only follow from the broken
        group, unless the member was alone in it."""
        for member, failed in group.failures.items():
            if not failed.answered or failed.phase not in COLLECTIVE or len(group.members) == 1:
                self._drop(member, failed.phase, failed.reason)
        if error is not None and len(group.members) == 1 and not group.failures:
            self._drop(group.members[0], "update", str(error))

    def _regroup(self, group: TransferGroup) -> list[TransferGroup]:
        """New groups of the members that neither have the version nor failed. If no engine could be
        singled out, each is retried on its own; the faulty one then fails alone."""
        done = {*group.finished}
        failed = [member for member in group.members if member.engine.url in self._failures]
        remaining = [m for m in group.members if m not in done and m not in failed]
        if not remaining:
            return []
        if failed:
            return [TransferGroup(remaining, group.source, self._settings)]
        return [TransferGroup([member], group.source, self._settings) for member in remaining]

    def _serve(self, finished: list[EngineMember]) -> None:
        confirmed = self._phase("confirm", finished, self._confirm)
        self._resume(confirmed)

    def _confirm(self, engine: EngineControl) -> None:
        label = engine.label(self._settings.weights_look_s, "confirm")
        if label != str(self._version):
            reason = f"it reports version {label}"
            raise EngineCallFailed(engine.url, "confirm", reason, answered=True)

    def _resume(self, members: list[EngineMember]) -> None:
        resumed = self._phase(
            "resume", members, lambda e: e.resume(self._settings.weights_resume_s)
        )
        self._serving |= {member.engine.url for member in resumed}

    def _drop(self, member: EngineMember, phase: str, reason: str) -> None:
        self._fail(member.engine.url, phase, reason)
        if member.has_open_update:
            try:
                member.engine.clear_label(self._settings.weights_look_s)
            except EngineCallFailed as error:
                log.info("%s; the engine stays paused", error)

    def _fail(self, url: str, phase: str, reason: str) -> None:
        self._failures[url] = EngineFailure(url, phase, reason)

    def _phase(
        self, phase: str, members: list[EngineMember], call: Callable[[EngineControl], None]
    ) -> list[EngineMember]:
        """Runs one phase for all members; returns those that succeeded."""
        if not members:
            return []
        engines = [member.engine for member in members]
        passed = {engine.url for engine, _ in self._each(phase, engines, call)}
        return [member for member in members if member.engine.url in passed]

    def _each(
        self, phase: str, engines: list[EngineControl], call: Callable[[EngineControl], T]
    ) -> list[tuple[EngineControl, T]]:
        """Calls all engines at once; failures are noted and left out of the result."""

        def attempt(engine: EngineControl) -> tuple[EngineControl, T] | None:
            try:
                return engine, call(engine)
            except EngineCallFailed as error:
                self._fail(engine.url, phase, error.reason)
                return None

        with self._times.phase(phase), ThreadPoolExecutor(max(len(engines), 1)) as executor:
            return [result for result in executor.map(attempt, engines) if result is not None]
