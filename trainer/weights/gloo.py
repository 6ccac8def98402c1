"""Sends weights over TCP, without GPUs: members meet at a TCPStore and form a gloo process group.

The trainer is rank 0 and hosts the store. It waits there for the workers, and stops waiting as soon as
a call to an engine has failed.
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

from trainer.weights.gloo_group import (
    POLL_S,
    STOP,
    GlooGroup,
    GlooInit,
    GlooUpdate,
    arrived_key,
    go_key,
    ready_key,
)
from trainer.weights.packing import pack, split_into_buffers
from trainer.weights.settings import WeightsSettings
from trainer.weights.source import Parameter, WeightSource
from trainer.weights.transport import TransportFailed, WeightSender, WeightSyncClient, in_background


class GlooTransport:
    def __init__(self, settings: WeightsSettings) -> None:
        self._settings = settings

    def join(self, client: WeightSyncClient, source: WeightSource, workers: int) -> WeightSender:
        return GlooSender(self._settings, client, source, workers)


class GlooSender:
    def __init__(
        self,
        settings: WeightsSettings,
        client: WeightSyncClient,
        source: WeightSource,
        workers: int,
    ) -> None:
        self._settings = settings
        self._client = client
        self._source = source
        self._ranks = range(1, workers + 1)
        self._updates = 0
        self._group: GlooGroup | None = None
        self._store = _open_store(settings)
        calls = in_background(client.init_weight_transfer_engine, asdict(self._init_info()))
        try:
            self._join(calls)
        except TransportFailed:
            self.shutdown()  # workers that wait at the store for the others give up
            calls.result()  # an error of an engine says more than ours
            raise
        except BaseException:
            self.shutdown()
            raise
        calls.result()

    def send_weights(self) -> None:
        self._client.start_weight_update()
        self._updates += 1
        parameters = self._source.metadata()
        deadline = time.monotonic() + self._settings.weights_update_s
        update = GlooUpdate.of(self._updates, parameters)
        calls = in_background(self._client.update_weights, asdict(update))
        try:
            self._await([ready_key(self._updates, rank) for rank in self._ranks], calls, deadline)
            self._store.set(go_key(self._updates), b"1")
            self._broadcast(parameters, deadline, calls)
        except TransportFailed:
            self.shutdown()
            calls.result()
            raise
        except BaseException:
            self.shutdown()  # so that engines do not wait in vain
            raise
        calls.result()
        self._client.finish_weight_update()

    def abort(self) -> None:
        """Nothing to do: a broadcast ends by itself when a call to an engine has failed."""

    def shutdown(self) -> None:
        """Leaves the group; workers that are still in it, after a failure, give up too."""
        if self._group is not None:
            self._group.close()
        if self._store is not None:
            self._store.set(STOP, b"1")
            # The store stays open for a while, so that workers can read the stop key.
            in_background(_keep_open, self._store, self._settings.weights_grace_s)
        self._group, self._store = None, None

    def _init_info(self) -> GlooInit:
        settings = self._settings
        return GlooInit(
            host=settings.weights_host,
            port=self._store.port,
            rank_offset=1,
            world_size=len(self._ranks) + 1,
            join_s=settings.weights_join_s,
            update_s=settings.weights_update_s,
            buffer_bytes=settings.weights_buffer_bytes,
        )

    def _join(self, calls: "Future[None]") -> None:
        settings = self._settings
        deadline = time.monotonic() + settings.weights_join_s
        self._await([arrived_key(rank) for rank in self._ranks], calls, deadline)
        self._store.set(go_key("join"), b"1")
        remaining = max(deadline - time.monotonic(), 0.001)
        try:
            self._group = GlooGroup(
                self._store, 0, len(self._ranks) + 1, settings.weights_host, remaining
            )
        except RuntimeError as error:
            raise TransportFailed(f"the process group could not be formed: {error}") from error

    def _await(self, keys: list[str], calls: "Future[None]", deadline: float) -> None:
        """Waits until all keys are in the store; fails if a call to an engine has ended without
        them."""
        while not self._store.check(keys):
            if calls.done():
                calls.result()
                if self._store.check(keys):
                    return
                raise TransportFailed(
                    "the engines responded, but not all of their workers joined the process group"
                )
            if time.monotonic() > deadline:
                raise TransportFailed("not all workers joined the process group in time")
            time.sleep(POLL_S)

    def _broadcast(
        self, parameters: list[Parameter], deadline: float, calls: "Future[None]"
    ) -> None:
        group = self._group
        if group is None:
            raise TransportFailed("the process group was closed before the transfer")
        tensors = iter(self._source)
        for chunk in split_into_buffers(parameters, self._settings.weights_buffer_bytes):
            flat = pack(_checked(islice(tensors, len(chunk)), chunk))
            try:
                group.broadcast(flat, deadline, lambda: _has_failed(calls))
            except RuntimeError as error:
                raise TransportFailed(f"the transfer was interrupted: {error}") from error
        for name, _ in tensors:
            raise ValueError(f"the weights contain {name}, which is missing in the metadata")


def _checked(
    tensors: Iterator[tuple[str, torch.Tensor]], chunk: list[Parameter]
) -> Iterator[torch.Tensor]:
    for parameter, (name, tensor) in zip(chunk, tensors, strict=True):
        actual = Parameter(name, tensor.dtype, tuple(tensor.shape))
        if actual != parameter:
            raise ValueError(f"the weights contain {actual} where the metadata say {parameter}")
        yield tensor


def _has_failed(calls: "Future[None]") -> bool:
    return calls.done() and calls.exception() is not None


def _keep_open(_store: Any, seconds: float) -> None:
    """Holds a reference to the store for so many seconds."""
    time.sleep(seconds)


def _open_store(settings: WeightsSettings) -> Any:
    """Opens the store on a free port; it listens on our address only."""
    family, kind, _, _, address = socket.getaddrinfo(
        settings.weights_host, 0, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family, kind)
    listener.bind(address)
    listener.listen()
    port = int(listener.getsockname()[1])
    return TCPStore(
        settings.weights_host,
        port,
        is_master=True,
        timeout=timedelta(seconds=settings.weights_join_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
