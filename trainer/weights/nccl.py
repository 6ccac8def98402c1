"""Sends weights between GPUs with vLLM's own NCCL code, extended by timeouts.

NCCL waits forever for a dead peer. So the group is formed in a thread that can be abandoned, and a
transfer is ended by aborting the communicator: `abort` does that from another thread as soon as a call
to an engine has failed or timed out. vLLM is imported only when a group is formed, since that takes
seconds.
"""

import socket
import threading
from contextlib import suppress
from typing import Any

import torch

from trainer.weights.settings import WeightsSettings
from trainer.weights.source import WeightSource
from trainer.weights.transport import TransportFailed, WeightSender, WeightSyncClient, in_background

GIVEN_UP = "steplog/given up"
"""Key in the group's store that the trainer sets when it leaves, so that workers stop waiting."""
NO_NCCL = (
    "vLLM found no usable NCCL library; it needs version 2.29.7 or later "
    "(set its path in VLLM_NCCL_SO_PATH)"
)
GRACE_S = 5.0
"""Seconds beyond the engines' time to join, so that their errors arrive before ours."""


class NcclUnavailable(Exception):
    """vLLM has no usable NCCL library. It ignores that, and every broadcast then silently does nothing:
    engines would confirm and serve weights that they never received."""


class NcclTransport:
    """The trainer's tensors must be on its current CUDA device."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._settings = settings

    def join(self, client: WeightSyncClient, source: WeightSource, workers: int) -> WeightSender:
        device = torch.cuda.current_device()
        watched = _WatchedClient(client)

        def make() -> Any:
            torch.cuda.set_device(device)  # a new thread starts with device 0
            return self._make(watched, source, workers)

        engine_future = in_background(make)
        engine_future.add_done_callback(lambda _: watched.is_over.set())
        watched.is_over.wait(self._settings.weights_join_s + GRACE_S)
        if watched.error is not None:
            raise watched.error
        if not engine_future.done():
            raise TransportFailed("the process group could not be formed in time")
        try:
            engine = engine_future.result()
        except RuntimeError as error:
            raise TransportFailed(f"the process group could not be formed: {error}") from error
        if engine.model_update_group.disabled:
            raise NcclUnavailable(f"the trainer cannot send weights: {NO_NCCL}")
        return NcclSender(engine)

    def _make(self, client: WeightSyncClient, source: WeightSource, workers: int) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=self._settings.weights_host,
            master_port=_free_port(self._settings.weights_host),
            world_size=workers + 1,
            packed_buffer_size_bytes=self._settings.weights_buffer_bytes,
        )
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class GuardedCommunicator:
    """A communicator that another thread may abort. The abort frees NCCL's communicator, and the thread
    that waited in a broadcast returns and would start the next one: it gets an error, not a crash."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.is_ended = False
        self._lock = threading.Lock()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        with self._lock:
            if self.is_ended:
                raise RuntimeError("the process group was aborted")
            self.group.broadcast(tensor, src, stream)

    def end(self) -> None:
        # Under the lock a broadcast is only enqueued, so this does not wait for one.
        with self._lock:
            if self.is_ended:
                return
            self.is_ended = True
        self.group.destroy()  # aborts the communicator, so that waiting kernels end


class NcclSender:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._group = engine.model_update_group = GuardedCommunicator(engine.model_update_group)

    def send_weights(self) -> None:
        try:
            self._engine.send_weights()
        except (
            RuntimeError
        ) as error:  # raised by NCCL and CUDA; errors of the client have another type
            raise TransportFailed(f"the transfer was interrupted: {error}") from error

    def abort(self) -> None:
        if not self._group.is_ended:
            with suppress(RuntimeError):
                self._group.group.group.store.set(GIVEN_UP, b"1")
            self._group.end()

    def shutdown(self) -> None:
        self.abort()
        self._engine.model_update_group = None


class _WatchedClient:
    """A client that reports a failure to join while our own side still waits for the other members."""

    def __init__(self, client: WeightSyncClient) -> None:
        self._client = client
        self.is_over = threading.Event()
        self.error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self._client.init_weight_transfer_engine(init_info)
        except BaseException as error:
            self.error = error
            self.is_over.set()
            raise


def _free_port(host: str) -> int:
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
