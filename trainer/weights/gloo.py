"""Weights over TCP, between processes that need no GPU: a TCPStore to meet at, a gloo group to send in.

The trainer is rank 0 and keeps the store. It waits for workers there, and stops waiting as soon as an
engine's call has failed.
"""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
from torch.distributed import TCPStore

from trainer.weights.gloo_group import POLL_S, STOP, Delivery, Group, Meeting, arrived, go, ready
from trainer.weights.packing import cut, pack
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import Parameter, Source
from trainer.weights.transport import Client, Sender, TransportFailed, in_background


class GlooTransport:
    def __init__(self, settings: WeightsSettings) -> None:
        self._settings = settings

    def join(self, client: Client, source: Source, workers: int) -> Sender:
        return GlooSender(self._settings, client, source, workers)


class GlooSender:
    def __init__(
        self, settings: WeightsSettings, client: Client, source: Source, workers: int
    ) -> None:
        self._settings = settings
        self._client = client
        self._source = source
        self._ranks = range(1, workers + 1)
        self._sent = 0
        self._group: Group | None = None
        self._store = _listen(settings)
        calls = in_background(client.init_weight_transfer_engine, asdict(self._meeting()))
        try:
            self._meet(calls)
        except TransportFailed:
            self.shutdown()  # whoever waits for the others at the store is sent away
            calls.result()  # an engine's own words are better than ours
            raise
        except BaseException:
            self.shutdown()
            raise
        calls.result()

    def send_weights(self) -> None:
        self._client.start_weight_update()
        self._sent += 1
        parameters = self._source.metadata()
        deadline = time.monotonic() + self._settings.weights_update_s
        delivery = Delivery.of(self._sent, parameters)
        calls = in_background(self._client.update_weights, asdict(delivery))
        try:
            self._await([ready(self._sent, rank) for rank in self._ranks], calls, deadline)
            self._store.set(go(self._sent), b"1")
            self._broadcast(parameters, deadline, calls)
        except TransportFailed:
            self.shutdown()
            calls.result()
            raise
        except BaseException:
            self.shutdown()  # engines need not wait for what will not come
            raise
        calls.result()
        self._client.finish_weight_update()

    def abort(self) -> None:
        """Nothing to do: a broadcast ends when a call has failed."""

    def shutdown(self) -> None:
        """Also after a failure, when workers are still in the group: they are sent away."""
        if self._group is not None:
            self._group.close()
        if self._store is not None:
            self._store.set(STOP, b"1")
            # The store outlives us for a while, so that they can read it there.
            in_background(_linger, self._store, self._settings.weights_grace_s)
        self._group, self._store = None, None

    def _meeting(self) -> Meeting:
        settings = self._settings
        return Meeting(
            host=settings.weights_host,
            port=self._store.port,
            rank_offset=1,
            world_size=len(self._ranks) + 1,
            join_s=settings.weights_join_s,
            update_s=settings.weights_update_s,
            buffer_bytes=settings.weights_buffer_bytes,
        )

    def _meet(self, calls: "Future[None]") -> None:
        settings = self._settings
        deadline = time.monotonic() + settings.weights_join_s
        self._await([arrived(rank) for rank in self._ranks], calls, deadline)
        self._store.set(go("join"), b"1")
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._group = Group(self._store, 0, len(self._ranks) + 1, settings.weights_host, left)
        except RuntimeError as error:
            raise TransportFailed(f"the process group did not come together: {error}") from error

    def _await(self, keys: list[str], calls: "Future[None]", deadline: float) -> None:
        """Until all have come, or one is known not to come."""
        while not self._store.check(keys):
            if calls.done():
                calls.result()
                if self._store.check(keys):
                    return
                raise TransportFailed("the engines answered, but not all workers came")
            if time.monotonic() > deadline:
                raise TransportFailed("not all workers came in time")
            time.sleep(POLL_S)

    def _broadcast(
        self, parameters: list[Parameter], deadline: float, calls: "Future[None]"
    ) -> None:
        group = self._group
        if group is None:
            raise TransportFailed("the process group broke before the transfer")
        tensors = iter(self._source)
        for chunk in cut(parameters, self._settings.weights_buffer_bytes):
            flat = pack(_checked(islice(tensors, len(chunk)), chunk))
            try:
                group.broadcast(flat, deadline, lambda: _failed(calls))
            except RuntimeError as error:
                raise TransportFailed(f"the transfer broke off: {error}") from error
        for name, _ in tensors:
            raise ValueError(f"the weights have {name}, which was not announced")


def _checked(
    tensors: Iterator[tuple[str, torch.Tensor]], chunk: list[Parameter]
) -> Iterator[torch.Tensor]:
    for parameter, (name, tensor) in zip(chunk, tensors, strict=True):
        found = Parameter(name, tensor.dtype, tuple(tensor.shape))
        if found != parameter:
            raise ValueError(f"the weights have {found} where {parameter} was announced")
        yield tensor


def _failed(calls: "Future[None]") -> bool:
    return calls.done() and calls.exception() is not None


def _linger(_: Any, seconds: float) -> None:
    """Keeps what it is given for so long."""
    time.sleep(seconds)


def _listen(settings: WeightsSettings) -> Any:
    """A store on a port that the system chose; it listens at our address only."""
    family, kind, _, _, address = socket.getaddrinfo(
        settings.weights_host, 0, type=socket.SOCK_STREAM
    )[0]
    listening = socket.socket(family, kind)
    listening.bind(address)
    listening.listen()
    port = int(listening.getsockname()[1])
    return TCPStore(
        settings.weights_host,
        port,
        is_master=True,
        timeout=timedelta(seconds=settings.weights_join_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
