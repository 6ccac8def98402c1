"""All engines: which have which weights, and how they get the newest.

* An engine that fails stays paused and out of routing until `tend` has brought it up to date.
* A version counts when every engine that can be reached has confirmed it.
* Within an incarnation an engine's version never decreases.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from pool.core.versions import Version
from trainer.weights.lockstep import Alone, Announced, Ranks, read_along
from trainer.weights.party import Member, Party
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import ModuleSource, Source
from trainer.weights.sync import Failure, Sync
from trainer.weights.sync import Synced as Synced
from trainer.weights.transport import Transport

log = logging.getLogger(__name__)


class Engines:
    """The list of engines; that of a file, once it could be read, goes before that of the settings."""

    def __init__(self, urls: Sequence[str] = (), file: Path | None = None) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._file = file

    def urls(self) -> list[str]:
        if self._file is not None:
            try:
                lines = self._file.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                log.warning("the list of engines stays as it is: %s: %s", self._file, error)
            else:
                stripped = [line.strip() for line in lines]
                self._urls = [line.rstrip("/") for line in stripped if line and line[0] != "#"]
        return list(dict.fromkeys(self._urls))


class Weights:
    """Every trainer rank has one and calls the same methods in the same order; the first talks."""

    def __init__(
        self,
        settings: WeightsSettings,
        source: Source,
        transport: Transport | None = None,
        ranks: Alone | Ranks | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version: Version | None = None
        """What the engines are to have."""
        self._settings = settings
        self._ranks = ranks or Alone()
        self._plain = source
        self._source = Announced(source, self._ranks)
        self._transport = transport or _transport(settings)
        self._engines = Engines(settings.engines, settings.engines_file)
        self._now = now
        self._party: Party | None = None
        self._labels: dict[str, str] = {}
        """The label that we last gave each engine; one that has another now was started anew."""
        self._retry_at: dict[str, float] = {}
        self._failed: dict[str, Failure] = {}

    def sync(self, version: Version) -> Synced:
        """Sends the source's present weights, which are this version, to all engines."""
        if self.version is not None and version < self.version:
            raise ValueError(f"version {version} after {self.version}: versions never decrease")
        self.version = version
        return self._lead_or_follow(lambda: self._sync(version, self._engines.urls(), False))

    def tend(self) -> Synced | None:
        """Sends the present version to engines that do not have it: those that came back, were left
        behind or are new. The others go on undisturbed. None: there was nothing to do."""
        if self.version is None:
            return None
        version = self.version
        report = self._lead_or_follow(lambda: self._sync(version, self._due(), True))
        return report if report.passes or report.failures else None

    def close(self) -> None:
        _close(self._party)
        self._party = None

    def _lead_or_follow(self, lead: Callable[[], Synced]) -> Synced:
        if not self._ranks.leads:
            return msgspec.json.decode(read_along(self._plain, self._ranks), type=Synced)
        report = lead()
        self._ranks.tell(msgspec.json.encode(report))
        return report

    def _due(self) -> list[str]:
        now = self._now()
        return [url for url in self._engines.urls() if self._retry_at.get(url, now) <= now]

    def _sync(self, version: Version, urls: list[str], apart: bool) -> Synced:
        sync = Sync(version, self._settings, self._transport, self._source)
        members = sync.pause(sync.look(urls))
        if members:
            kept = sync.send_to(
                Party(members, self._settings) if apart else self._party_of(members)
            )
            if apart:
                _close(kept)
            else:
                self._party = kept
        report = sync.report()
        self._note(urls, report)
        return report

    def _party_of(self, members: list[Member]) -> Party:
        """The group of the last time if it is the same engines, still as we left them."""
        party, self._party = self._party, None
        known = all(self._labels.get(m.engine.url) == m.state.label for m in members)
        if party is not None and known and party.keys == [member.key for member in members]:
            party.take(members)
            return party
        _close(party)
        return Party(members, self._settings)

    def _note(self, urls: list[str], report: Synced) -> None:
        self._labels |= dict.fromkeys(report.engines, report.version)
        failed = {failure.url: failure for failure in report.failures}
        again = self._now() + self._settings.weights_retry_s
        for url in urls:
            failure = failed.get(url)
            if failure is not None:
                self._retry_at[url] = again
                if failure != self._failed.get(url):
                    log.warning("engine %s failed to %s: %s", url, failure.phase, failure.reason)
                self._failed[url] = failure
            else:
                self._retry_at.pop(url, None)
                self._failed.pop(url, None)


def open_weights(
    settings: WeightsSettings, module: Any, ranks: Alone | Ranks | None = None
) -> Weights:
    """For the parameters of a module, which may be sharded."""
    dtype = settings.weights_dtype and getattr(torch, settings.weights_dtype)
    return Weights(settings, ModuleSource(module, dtype), ranks=ranks)


def _close(party: Party | None) -> None:
    if party is not None:
        party.close()


def _transport(settings: WeightsSettings) -> Transport:
    if settings.weights_transport == "nccl":
        from trainer.weights.nccl import NcclTransport

        return NcclTransport(settings)
    from trainer.weights.gloo import GlooTransport

    return GlooTransport(settings)
