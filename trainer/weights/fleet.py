"""All engines of a run: which version each has, and how they get the newest.

* An engine that fails stays paused and out of routing until `catch_up` has sent it the version.
* A version is complete when every reachable engine has confirmed it.
* Within an incarnation an engine's version never decreases.
* An engine with LoRA layers gets the adapters alone, if adapters are trained; others get whole models.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pool.core.versions import Version
from trainer.weights.ranks import AnnouncedSource, RankGroup, SingleRank, read_along
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import AdapterSource, WeightSource
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
        adapters: AdapterSource | None = None,
    ) -> None:
        """`source` is the whole model; `adapters` is what is trained of it, if that is not all."""
        self.version: Version | None = None
        """The version that the engines should have."""
        self._settings = settings
        self._ranks = ranks or SingleRank()
        self._unannounced: list[WeightSource] = [source]
        self._sources = {False: AnnouncedSource(source, self._ranks)}
        """What an engine is sent, by whether it takes adapters."""
        self._adapter_rank = 0
        if adapters is not None:
            self._unannounced.append(adapters)
            self._sources[True] = AnnouncedSource(adapters, self._ranks, number=1)
            self._adapter_rank = adapters.rank
        self._transport = transport or _make_transport(settings)
        self._engines = EngineList(settings.engines, settings.engines_file)
        self._now = now
        self._groups: dict[bool, TransferGroup | None] = {}
        """The last transfer group for each source."""
        self._takes_adapter: dict[str, bool] = {}
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
        for group in self._groups.values():
            _close(group)
        self._groups.clear()

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
        sync = VersionSync(version, self._settings, self._transport)
        members = sync.find_members(urls)
        if self._adapter_rank:
            members = sync.choose_adapters(members, self._adapter_rank)
            self._log_kinds(members)
        members = sync.pause(members)
        for kind, source in self._sources.items():
            receivers = [member for member in members if member.takes_adapter == kind]
            if receivers and reuse:
                self._groups[kind] = sync.send_to(self._group_of(receivers, kind))
            elif receivers:
                _close(sync.send_to(TransferGroup(receivers, source, self._settings)))
        report = sync.report()
        self._note_result(urls, report)
        return report

    def _log_kinds(self, members: list[EngineMember]) -> None:
        """Says for each engine once whether it gets adapters or merged weights."""
        for member in members:
            url = member.engine.url
            if self._takes_adapter.get(url) == member.takes_adapter:
                continue
            self._takes_adapter[url] = member.takes_adapter
            if member.takes_adapter:
                log.info("engine %s gets the LoRA adapters", url)
            else:
                log.info(
                    "engine %s gets the model with the LoRA adapters merged; start it with "
                    "--enable-lora --max-lora-rank %d to send it the adapters alone",
                    url, self._adapter_rank,
                )  # fmt: skip

    def _group_of(self, members: list[EngineMember], kind: bool) -> TransferGroup:
        """The last transfer group if it has the same engines and none was restarted, else a new one."""
        group = self._groups.pop(kind, None)
        unchanged = all(self._labels.get(m.engine.url) == m.state.label for m in members)
        if group is not None and unchanged and group.keys == [member.key for member in members]:
            group.refresh(members)
            return group
        _close(group)
        return TransferGroup(members, self._sources[kind], self._settings)

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
