"""A gloo process group to send weights in, and the receiving side of it, which runs in vLLM's workers.

Nobody enters a collective call before all others are known to come: each worker says in the store that
it is ready, and waits there for the trainer's word, which comes when all are; or the store closes. From then on only a death or a hang can disturb; gloo reports the first at once and the second at
the deadline.
"""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from trainer.weights.packing import cut, empty, unpack
from trainer.weights.source import Parameter


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

    def broadcast(self, flat: torch.Tensor, deadline: float) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        self._group.broadcast([flat], options).wait()

    def close(self) -> None:
        """All others see it at once. Not while a broadcast runs: it would wait for its end, and hold
        up every other thread."""
        self._group = None


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
        self._store.wait([go(delivery.number)], timedelta(seconds=self._meeting.update_s))
        for chunk in cut(delivery.parameters(), self._meeting.buffer_bytes):
            flat = empty(chunk)
            self._group.broadcast(flat, deadline)
            yield list(unpack(flat, chunk))

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


def go(number: int) -> str:
    return f"go/{number}"
