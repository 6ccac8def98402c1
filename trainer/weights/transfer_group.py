"""A transfer group: the trainer and some engines in one process group, which receive weights together.

A group is broken as soon as one member fails. After that, no other member may be waited for before the
group is closed, since it may itself be waiting in that group. So a phase ends with its first failure,
and `close` waits for the remaining calls. Every call has a timeout, so this ends too.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.weights.engine import EngineCallFailed, EngineControl, EngineState
from trainer.weights.ranks import AnnouncedSource
from trainer.weights.settings import WeightsSettings
from trainer.weights.transport import Transport, WeightSender, in_background

COLLECTIVE = ("join", "update")
"""Phases in which one engine's failure makes others fail as well."""


class TransferIncomplete(Exception):
    """At least one engine failed; `TransferGroup.failures` has the details."""


@dataclass(slots=True, eq=False)
class EngineMember:
    """An engine in a transfer group."""

    engine: EngineControl
    state: EngineState
    """Its state when it was last read."""
    has_open_update: bool
    """Whether an update may have been started and not finished."""
    takes_adapter: bool = False
    """Whether it is sent LoRA adapters, and not the whole model."""

    @property
    def key(self) -> tuple[str, int]:
        return self.engine.url, self.state.world_size


class PhaseTimes:
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


class TransferGroup:
    """Implements vLLM's `VLLMWeightSyncClient` for all members at once."""

    def __init__(
        self, members: Sequence[EngineMember], source: AnnouncedSource, settings: WeightsSettings
    ) -> None:
        self.members = tuple(members)
        self.source = source
        self.failures: dict[EngineMember, EngineCallFailed] = {}
        self.finished: list[EngineMember] = []
        self._settings = settings
        self._sender: WeightSender | None = None
        self._label = ""
        self._times = PhaseTimes()
        self._running: list[Future[None]] = []

    @property
    def keys(self) -> list[tuple[str, int]]:
        return [member.key for member in self.members]

    def refresh(self, members: Sequence[EngineMember]) -> None:
        """Takes over the newly read states of the same engines."""
        self.members = tuple(members)

    def send(self, label: str, transport: Transport, times: PhaseTimes) -> None:
        self._label, self._times = label, times
        self.failures, self.finished = {}, []
        if self._sender is None:
            workers = sum(member.state.world_size for member in self.members)
            self._sender = transport.join(self, self.source, workers)
        self._sender.send_weights()

    def close(self) -> None:
        """Leaves the process group and waits until no call to a member is running any more."""
        if self._sender is not None:
            self._sender.shutdown()
            self._sender = None
        wait(self._running)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        rank_offset = int(init_info["rank_offset"])
        infos = {}
        for member in self.members:
            infos[member] = init_info | {"rank_offset": rank_offset}
            rank_offset += member.state.world_size
        timeout = self._settings.weights_join_s + self._settings.weights_grace_s
        self._call_all("join", lambda member: member.engine.join(infos[member], timeout))

    def start_weight_update(self) -> None:
        self._call_all("start", self._start)

    def update_weights(self, update_info: Any) -> None:
        timeout = self._settings.weights_update_s + self._settings.weights_grace_s
        self._call_all("update", lambda member: member.engine.update(update_info, timeout))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_all("finish", lambda member: self._finish(member, weight_version or self._label))

    def _start(self, member: EngineMember) -> None:
        if member.has_open_update:
            member.engine.end_interrupted_update(self._settings.weights_finish_s)
        member.has_open_update = True
        member.engine.start(self._settings.weights_start_s)

    def _finish(self, member: EngineMember, label: str) -> None:
        member.engine.finish(label, self._settings.weights_finish_s)
        member.has_open_update = False
        self.finished.append(member)

    def _call_all(self, phase: str, call: Callable[[EngineMember], None]) -> None:
        with self._times.phase(phase):
            futures = [in_background(self._call_one, member, call) for member in self.members]
            self._running = futures
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        errors = [error for future in done if (error := future.exception())]
        if errors:
            if phase == "update" and self._sender is not None:
                self._sender.abort()
            raise TransferIncomplete(f"not every engine completed phase {phase}") from errors[0]

    def _call_one(self, member: EngineMember, call: Callable[[EngineMember], None]) -> None:
        try:
            call(member)
        except EngineCallFailed as error:
            self.failures[member] = error
            raise
