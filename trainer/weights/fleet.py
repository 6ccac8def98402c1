"""All engines of a run: which version each has, and how they get the newest.

* An engine that fails stays paused and out of routing until `catch_up` has sent it the version.
* A version is complete when every reachable engine has confirmed it.
* Within an incarnation an engine's version never decreases.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pool.core.versions import Version
from trainer.weights.ranks import AnnouncedSource, RankGroup, SingleRank, read_along
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import WeightSource
from trainer.weights.sync import EngineFailure, SyncReport, VersionSync
from trainer.weights.transfer_group import EngineMember, TransferGroup
from trainer.weights.transport import Transport

log = logging.getLogger(__name__)


class EngineList:
    """URLs of the engines. A file, once it could be read, takes precedence over the settings."""

    def __init__(self, urls: Sequence[str] = (), file: Path | None = None) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._file = file

    def urls(self) -> list[str]:
        if self._file is not None:
            try:
                lines = self._file.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                log.warning(
                    "cannot read the engine list %s, keeping the last one: %s", self._file, error
                )
            else:
                stripped = [line.strip() for line in lines]
                self._urls = [line.rstrip("/") for line in stripped if line and line[0] != "#"]
        return list(dict.fromkeys(self._urls))


class EngineFleet:
    """Sends weights to all engines. Every trainer rank has one and calls the same methods in the same
    order; only rank 0 talks to engines."""

    def __init__(
        self,
        settings: WeightsSettings,
        source: WeightSource,
        transport: Transport | None = None,
        ranks: SingleRank | RankGroup | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version: Version | None = None
        """The version that the engines should have."""
        self._settings = settings
        self._ranks = ranks or SingleRank()
        self._unannounced = source
        self._source = AnnouncedSource(source, self._ranks)
        self._transport = transport or _make_transport(settings)
        self._engines = EngineList(settings.engines, settings.engines_file)
        self._now = now
        self._group: TransferGroup | None = None
        self._labels: dict[str, str] = {}
        """The label that we last set on each engine; if it differs now, the engine was restarted."""
        self._retry_at: dict[str, float] = {}
        self._failed: dict[str, EngineFailure] = {}

    def sync(self, version: Version) -> SyncReport:
        """Sends the present weights, which are this version, to all engines."""
        if self.version is not None and version < self.version:
            raise ValueError(
                f"version {version} is older than {self.version}; versions never decrease"
            )
        self.version = version
        return self._lead_or_follow(lambda: self._sync(version, self._engines.urls(), reuse=True))

    def catch_up(self) -> SyncReport | None:
        """Sends the present version to engines that do not have it: restarted, failed or new ones. The
        others are not disturbed. Returns None if there was nothing to do."""
        if self.version is None:
            return None
        version = self.version
        report = self._lead_or_follow(lambda: self._sync(version, self._due(), reuse=False))
        return report if report.passes or report.failures else None

    def close(self) -> None:
        _close(self._group)
        self._group = None

    def _lead_or_follow(self, lead: Callable[[], SyncReport]) -> SyncReport:
        if not self._ranks.is_leader:
            report = read_along(self._unannounced, self._ranks)
            return msgspec.json.decode(report, type=SyncReport)
        sync_report = lead()
        self._ranks.send_report(msgspec.json.encode(sync_report))
        return sync_report

    def _due(self) -> list[str]:
        """Engines whose time for a retry has come, and all that never failed."""
        now = self._now()
        return [url for url in self._engines.urls() if self._retry_at.get(url, now) <= now]

    def _sync(self, version: Version, urls: list[str], reuse: bool) -> SyncReport:
        """`reuse` says whether to use the last transfer group again, and to keep this one."""
        sync = VersionSync(version, self._settings, self._transport, self._source)
        members = sync.pause(sync.find_members(urls))
        if members:
            group = self._group_of(members) if reuse else TransferGroup(members, self._settings)
            intact = sync.send_to(group)
            if reuse:
                self._group = intact
            else:
                _close(intact)
        report = sync.report()
        self._note_result(urls, report)
        return report

    def _group_of(self, members: list[EngineMember]) -> TransferGroup:
        """The last transfer group if it has the same engines and none was restarted, else a new one."""
        group, self._group = self._group, None
        unchanged = all(self._labels.get(m.engine.url) == m.state.label for m in members)
        if group is not None and unchanged and group.keys == [member.key for member in members]:
            group.refresh(members)
            return group
        _close(group)
        return TransferGroup(members, self._settings)

    def _note_result(self, urls: list[str], report: SyncReport) -> None:
        self._labels |= dict.fromkeys(report.engines, report.version)
        failed = {failure.url: failure for failure in report.failures}
        retry_at = self._now() + self._settings.weights_retry_s
        for url in urls:
            failure = failed.get(url)
            if failure is not None:
                self._retry_at[url] = retry_at
                if failure != self._failed.get(url):
                    log.warning(
                        "engine %s failed in phase %s: %s", url, failure.phase, failure.reason
                    )
                self._failed[url] = failure
            else:
                self._retry_at.pop(url, None)
                self._failed.pop(url, None)


def _close(group: TransferGroup | None) -> None:
    if group is not None:
        group.close()


def _make_transport(settings: WeightsSettings) -> Transport:
    if settings.weights_transport == "nccl":
        from trainer.weights.nccl import NcclTransport

        return NcclTransport(settings)
    from trainer.weights.gloo import GlooTransport

    return GlooTransport(settings)
