"""One version on its way to some engines: pause, send, confirm, resume; and what came of it.

One engine's death costs the others one more pass, not the version: the survivors make a new group. An
engine is resumed only with a whole version that it has confirmed.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from pool.core.versions import Version
from trainer.weights.engine import Engine, EngineFailed
from trainer.weights.lockstep import Announced
from trainer.weights.party import COLLECTIVE, Incomplete, Member, Party, Times
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import total_bytes
from trainer.weights.transport import Transport, TransportFailed

log = logging.getLogger(__name__)
T = TypeVar("T")


class Failure(msgspec.Struct, frozen=True):
    url: str
    phase: str
    reason: str


class Synced(msgspec.Struct, frozen=True):
    """What came of sending a version."""

    version: str
    engines: tuple[str, ...] = ()
    """Those that have it and serve it."""
    failures: tuple[Failure, ...] = ()
    seconds: dict[str, float] = {}
    """By phase."""
    bytes: int = 0
    """Sent, over all passes; what several receive at once counts once."""
    passes: int = 0

    @property
    def counts(self) -> bool:
        """Every engine that could be reached has it, and there is one."""
        return bool(self.engines)

    def __str__(self) -> str:
        what = f"engines with version {self.version}: {len(self.engines)}"
        if not self.failures:
            return what
        each = (f"{each.url} failed to {each.phase} ({each.reason})" for each in self.failures)
        return f"{what}; {'; '.join(each)}"


class Sync:
    """One version on its way to some engines."""

    def __init__(
        self,
        version: Version,
        settings: WeightsSettings,
        transport: Transport,
        source: Announced,
    ) -> None:
        self._version = version
        self._settings = settings
        self._transport = transport
        self._source = source
        self._before = source.passes
        self._times = Times()
        self._urls: list[str] = []
        self._have: set[str] = set()
        self._failures: dict[str, Failure] = {}

    def report(self) -> Synced:
        passes = self._source.passes - self._before
        return Synced(
            version=str(self._version),
            engines=tuple(url for url in self._urls if url in self._have),
            failures=tuple(self._failures.values()),
            seconds=dict(self._times.seconds),
            bytes=passes * total_bytes(self._source) if passes else 0,
            passes=passes,
        )

    def look(self, urls: list[str]) -> list[Member]:
        """The engines that need the version."""
        self._urls = urls
        engines = [Engine(url) for url in urls]
        states = self._each(
            "look", engines, lambda engine: engine.look(self._settings.weights_look_s)
        )
        members = []
        for engine, state in states:
            # We leave an engine paused only when something went wrong; so does any other trainer.
            member = Member(engine, state, torn=state.paused)
            if self._needs(member):
                members.append(member)
        return members

    def _needs(self, member: Member) -> bool:
        engine, state = member.engine, member.state
        if state.version is None or state.version < self._version:
            return True
        if state.version > self._version:
            reason = f"it has {state.version}, which is newer: another trainer has taken over"
            self._fail(engine.url, "look", reason)
        elif state.paused:
            self._resume([member])
        else:
            self._have.add(engine.url)
        return False

    def pause(self, members: list[Member]) -> list[Member]:
        return self._phase("pause", members, lambda e: e.pause(self._settings.weights_pause_s))

    def send_to(self, party: Party) -> Party | None:
        """Until every member has the version or is known to have failed. Gives the group in which all
        of them are, if there is one: the next version can go the same way."""
        waiting, whole = [party], []
        while waiting:
            party = waiting.pop()
            if self._attempt(party):
                whole.append(party)
            else:
                waiting += self._rest(party)
        if len(whole) == 1:
            return whole[0]
        for party in whole:
            party.close()
        return None

    def _attempt(self, party: Party) -> bool:
        """Whether all went well. Those that have the version serve it at once."""
        error: Exception | None = None
        try:
            party.send(str(self._version), self._transport, self._source, self._times)
        except (Incomplete, TransportFailed) as caught:
            error = caught
            party.close()
            self._source.end()
        except BaseException:
            party.close()
            raise
        self._serve(party.finished)
        self._judge(party, error)
        return error is None

    def _judge(self, party: Party, error: Exception | None) -> None:
        """Who is to blame? An engine that is gone is, and one that failed where it depends on no
        other. What others answer in a group that broke shows nothing, unless there are no others."""
        for member, failed in party.failures.items():
            if not failed.answered or failed.phase not in COLLECTIVE or len(party.members) == 1:
                self._leave(member, failed.phase, failed.reason)
        if error is not None and len(party.members) == 1 and not party.failures:
            self._leave(party.members[0], "update", str(error))

    def _rest(self, party: Party) -> list[Party]:
        """Those that neither have it nor failed. Nobody to blame: each goes alone, so that it shows."""
        done = {*party.finished}
        lost = [member for member in party.members if member.engine.url in self._failures]
        again = [m for m in party.members if m not in done and m not in lost]
        if not again:
            return []
        if lost:
            return [Party(again, self._settings)]
        return [Party([member], self._settings) for member in again]

    def _serve(self, finished: list[Member]) -> None:
        confirmed = self._phase("confirm", finished, self._confirm)
        self._resume(confirmed)

    def _confirm(self, engine: Engine) -> None:
        label = engine.label(self._settings.weights_look_s, "confirm")
        if label != str(self._version):
            reason = f"it says that it has {label}"
            raise EngineFailed(engine.url, "confirm", reason, answered=True)

    def _resume(self, members: list[Member]) -> None:
        resumed = self._phase(
            "resume", members, lambda e: e.resume(self._settings.weights_resume_s)
        )
        self._have |= {member.engine.url for member in resumed}

    def _leave(self, member: Member, phase: str, reason: str) -> None:
        self._fail(member.engine.url, phase, reason)
        if member.torn:
            try:
                member.engine.disown(self._settings.weights_look_s)
            except EngineFailed as error:
                log.info("%s; it stays paused", error)

    def _fail(self, url: str, phase: str, reason: str) -> None:
        self._failures[url] = Failure(url, phase, reason)

    def _phase(
        self, phase: str, members: list[Member], call: Callable[[Engine], None]
    ) -> list[Member]:
        """The members that came through."""
        if not members:
            return []
        engines = [member.engine for member in members]
        passed = {engine.url for engine, _ in self._each(phase, engines, call)}
        return [member for member in members if member.engine.url in passed]

    def _each(
        self, phase: str, engines: list[Engine], call: Callable[[Engine], T]
    ) -> list[tuple[Engine, T]]:
        """Calls all at once; those that fail are noted and left out."""

        def attempt(engine: Engine) -> tuple[Engine, T] | None:
            try:
                return engine, call(engine)
            except EngineFailed as error:
                self._fail(engine.url, phase, error.reason)
                return None

        with self._times.phase(phase), ThreadPoolExecutor(max(len(engines), 1)) as executor:
            return [result for result in executor.map(attempt, engines) if result is not None]
