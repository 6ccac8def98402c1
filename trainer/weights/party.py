"""Engines that get weights together: one process group, and vLLM's client to all of them at once.

A group is broken as soon as one member fails. Then no other may be waited for before the group is
closed, since it may itself wait in that group; so a phase ends with its first failure, and `close`
gathers the rest. Every call has a deadline, so that this ends too.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.weights.engine import Engine, EngineFailed, State
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import Source
from trainer.weights.transport import Sender, Transport, in_background

COLLECTIVE = ("join", "update")
"""Phases in which one engine's failure makes others fail as well."""


class Incomplete(Exception):
    """Some engine failed; `Party.failures` has the details."""


@dataclass(slots=True, eq=False)
class Member:
    engine: Engine
    state: State
    """As it was when it was looked at."""
    torn: bool
    """An update may have begun and not ended."""

    @property
    def key(self) -> tuple[str, int]:
        return self.engine.url, self.state.world_size


class Times:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - started


class Party:
    """Also vLLM's `VLLMWeightSyncClient`."""

    def __init__(self, members: Sequence[Member], settings: WeightsSettings) -> None:
        self.members = tuple(members)
        self.failures: dict[Member, EngineFailed] = {}
        self.finished: list[Member] = []
        self._settings = settings
        self._sender: Sender | None = None
        self._label = ""
        self._times = Times()
        self._running: list[Future[None]] = []

    @property
    def keys(self) -> list[tuple[str, int]]:
        return [member.key for member in self.members]

    def take(self, members: Sequence[Member]) -> None:
        """The same engines, looked at again."""
        self.members = tuple(members)

    def send(self, label: str, transport: Transport, source: Source, times: Times) -> None:
        self._label, self._times = label, times
        self.failures, self.finished = {}, []
        if self._sender is None:
            workers = sum(member.state.world_size for member in self.members)
            self._sender = transport.join(self, source, workers)
        self._sender.send_weights()

    def close(self) -> None:
        """From here on no call of ours is under way."""
        if self._sender is not None:
            self._sender.shutdown()
            self._sender = None
        wait(self._running)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        first = int(init_info["rank_offset"])
        infos = {}
        for member in self.members:
            infos[member] = init_info | {"rank_offset": first}
            first += member.state.world_size
        limit = self._settings.weights_join_s + self._settings.weights_grace_s
        self._all("join", lambda member: member.engine.join(infos[member], limit))

    def start_weight_update(self) -> None:
        self._all("start", self._start)

    def update_weights(self, update_info: Any) -> None:
        limit = self._settings.weights_update_s + self._settings.weights_grace_s
        self._all("update", lambda member: member.engine.update(update_info, limit))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish", lambda member: self._finish(member, weight_version or self._label))

    def _start(self, member: Member) -> None:
        if member.torn:
            member.engine.mend(self._settings.weights_finish_s)
        member.torn = True
        member.engine.start(self._settings.weights_start_s)

    def _finish(self, member: Member, label: str) -> None:
        member.engine.finish(label, self._settings.weights_finish_s)
        member.torn = False
        self.finished.append(member)

    def _all(self, phase: str, call: Callable[[Member], None]) -> None:
        with self._times.phase(phase):
            futures = [in_background(self._one, member, call) for member in self.members]
            self._running = futures
            over, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [error for future in over if (error := future.exception())]
        if failed:
            if phase == "update" and self._sender is not None:
                self._sender.abort()
            raise Incomplete(f"not every engine could {phase}") from failed[0]

    def _one(self, member: Member, call: Callable[[Member], None]) -> None:
        try:
            call(member)
        except EngineFailed as error:
            self.failures[member] = error
            raise
