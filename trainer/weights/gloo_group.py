"""A gloo process group to send weights in, and the receiving side of it, which runs in vLLM's workers.

Nobody enters a collective call before all others are known to come: each worker says in the store that
it is ready, and waits there for the trainer's word. And nobody stays in one when the trainer has said
stop there: gloo sees most deaths at once, but it leaves some waiting until the deadline, and always
those that wait for a rank which is well but does not come.
"""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from trainer.weights.packing import cut, empty, unpack
from trainer.weights.source import Parameter

STOP = "stop"
"""The trainer's word in the store that this group is over."""
POLL_S = 0.001
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where to meet; sent to every engine, each with its own rank offset."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    join_s: float
    update_s: float
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """What comes, and the how manieth in this group it is."""

    number: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    @classmethod
    def of(cls, number: int, parameters: list[Parameter]) -> "Delivery":
        return cls(
            number,
            [parameter.name for parameter in parameters],
            [str(parameter.dtype).removeprefix("torch.") for parameter in parameters],
            [list(parameter.shape) for parameter in parameters],
        )

    def parameters(self) -> list[Parameter]:
        columns = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [
            Parameter(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in columns
        ]


class Group:
    """A gloo process group that stands apart from torch's own."""

    def __init__(self, store: Any, rank: int, size: int, address: str, limit: float) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=limit)
        self._group: Any = ProcessGroupGloo(PrefixStore("group", store), rank, size, options)

    def broadcast(self, flat: torch.Tensor, deadline: float, stopped: Callable[[], bool]) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        work = self._group.broadcast([flat], options)
        look_at = time.monotonic() + LOOK_S
        while not work.is_completed():
            time.sleep(POLL_S)
            if time.monotonic() > look_at:
                look_at += LOOK_S
                if stopped():
                    _abandoned.append((self._group, work))
                    raise RuntimeError("another member failed")
        work.wait()

    def close(self) -> None:
        """All others see it at once, unless a broadcast was abandoned here."""
        self._group = None
        _abandoned[:] = [each for each in _abandoned if not each[1].is_completed()]


_abandoned: list[tuple[Any, Any]] = []
"""Groups in which a broadcast waits for its deadline. To end one would wait for that as well, and hold
up every other thread meanwhile."""


class Worker:
    """The receiving side of one rank."""

    def __init__(self, meeting: Meeting, place: int) -> None:
        self._meeting = meeting
        self._rank = meeting.rank_offset + place
        limit = timedelta(seconds=meeting.join_s)
        self._store = TCPStore(
            meeting.host, meeting.port, is_master=False, timeout=limit, wait_for_workers=False
        )
        self._store.set(arrived(self._rank), b"1")
        self._await(go("join"), time.monotonic() + meeting.join_s)
        address = _address_towards(meeting.host, meeting.port)
        self._group: Group | None = Group(
            self._store, self._rank, meeting.world_size, address, meeting.join_s
        )

    def receive(self, delivery: Delivery) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The parameters, a buffer at a time."""
        if self._group is None:
            raise RuntimeError("the process group broke in an earlier update; join a new one")
        deadline = time.monotonic() + self._meeting.update_s
        self._store.set(ready(delivery.number, self._rank), b"1")
        self._await(go(delivery.number), deadline)
        for chunk in cut(delivery.parameters(), self._meeting.buffer_bytes):
            flat = empty(chunk)
            self._group.broadcast(flat, deadline, self._stopped)
            yield list(unpack(flat, chunk))

    def _await(self, key: str, deadline: float) -> None:
        while not self._store.check([key]):
            if self._stopped():
                raise RuntimeError("another member failed")
            if time.monotonic() > deadline:
                raise TimeoutError("the trainer does not go on")
            time.sleep(POLL_S)

    def _stopped(self) -> bool:
        try:
            return bool(self._store.check([STOP]))
        except RuntimeError:
            return True  # the trainer is gone, and its store with it

    def close(self) -> None:
        """The others need not wait for us."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _address_towards(host: str, port: int) -> str:
    """Our own address on the way there; a machine has several, and gloo would guess."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def arrived(rank: int) -> str:
    return f"arrived/{rank}"


def ready(number: int, rank: int) -> str:
    return f"ready/{number}/{rank}"


def go(what: int | str) -> str:
    return f"go/{what}"
