"""The gloo process group that weights are sent in, and its receiving side, which runs in vLLM's
workers.

No member enters a collective call before all others are known to enter it: each worker sets a key in
the store when it is ready, and waits there for the trainer's go. No member stays in a collective call
after the trainer has set the stop key: gloo notices most dead peers at once, but some only at the
deadline, and never a peer that is alive but does not enter the call.
"""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from trainer.weights.packing import empty_buffer, split_into_buffers, unpack
from trainer.weights.source import Parameter

STOP = "stop"
"""Key in the store that the trainer sets to end the group."""
POLL_S = 0.001
STOP_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class GlooInit:
    """Where and how to join; sent to every engine, each with its own rank offset."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    join_s: float
    update_s: float
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class GlooUpdate:
    """The parameters of one update, and its number in this group."""

    number: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    @classmethod
    def of(cls, number: int, parameters: list[Parameter]) -> "GlooUpdate":
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


class GlooGroup:
    """A gloo process group that is independent of torch's default group."""

    def __init__(self, store: Any, rank: int, size: int, address: str, timeout: float) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout)
        self._group: Any = ProcessGroupGloo(PrefixStore("group", store), rank, size, options)

    def broadcast(
        self, flat: torch.Tensor, deadline: float, is_stopped: Callable[[], bool]
    ) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        work = self._group.broadcast([flat], options)
        check_at = time.monotonic() + STOP_CHECK_S
        while not work.is_completed():
            time.sleep(POLL_S)
            if time.monotonic() > check_at:
                check_at += STOP_CHECK_S
                if is_stopped():
                    _abandoned.append((self._group, work))
                    raise RuntimeError("another member of the process group failed")
        work.wait()

    def close(self) -> None:
        """Leaves the group. The others notice at once, unless a broadcast was abandoned here."""
        self._group = None
        _abandoned[:] = [entry for entry in _abandoned if not entry[1].is_completed()]


_abandoned: list[tuple[Any, Any]] = []
"""Groups with a broadcast that waits for its deadline. Destroying one would wait for it too, and block
every other thread meanwhile, so they are kept until it is over."""


class GlooReceiver:
    """The receiving side of one worker."""

    def __init__(self, init: GlooInit, worker_index: int) -> None:
        self._init = init
        self._rank = init.rank_offset + worker_index
        timeout = timedelta(seconds=init.join_s)
        self._store = TCPStore(
            init.host, init.port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        self._store.set(arrived_key(self._rank), b"1")
        self._await(go_key("join"), time.monotonic() + init.join_s)
        address = _local_address_towards(init.host, init.port)
        self._group: GlooGroup | None = GlooGroup(
            self._store, self._rank, init.world_size, address, init.join_s
        )

    def receive(self, update: GlooUpdate) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yields the received parameters, one buffer at a time."""
        if self._group is None:
            raise RuntimeError(
                "the process group was closed after an earlier failure; join a new one"
            )
        deadline = time.monotonic() + self._init.update_s
        self._store.set(ready_key(update.number, self._rank), b"1")
        self._await(go_key(update.number), deadline)
        for chunk in split_into_buffers(update.parameters(), self._init.buffer_bytes):
            flat = empty_buffer(chunk)
            self._group.broadcast(flat, deadline, self._is_stopped)
            yield list(unpack(flat, chunk))

    def _await(self, key: str, deadline: float) -> None:
        while not self._store.check([key]):
            if self._is_stopped():
                raise RuntimeError("another member of the process group failed")
            if time.monotonic() > deadline:
                raise TimeoutError("the trainer did not continue in time")
            time.sleep(POLL_S)

    def _is_stopped(self) -> bool:
        try:
            return bool(self._store.check([STOP]))
        except RuntimeError:
            return True  # the store is gone, so the trainer is too

    def close(self) -> None:
        """Leaves the group, so that the others do not wait for us."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _local_address_towards(host: str, port: int) -> str:
    """The local address that reaches the host. A machine may have several, and gloo would guess."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def arrived_key(rank: int) -> str:
    return f"arrived/{rank}"


def ready_key(number: int, rank: int) -> str:
    return f"ready/{number}/{rank}"


def go_key(stage: int | str) -> str:
    return f"go/{stage}"
