"""Weights between GPUs: vLLM's own trainer side, with an end to its waiting.

NCCL waits for ever for a peer that died. So the group is made in a thread that can be left alone, and
a transfer is ended by aborting the communicator, which `abort` does from another thread as soon as an
engine's call has failed or run out of time. vLLM is imported when a group is made: it takes seconds.
"""

import socket
import threading
from contextlib import suppress
from typing import Any

import torch

from trainer.weights.settings import WeightsSettings
from trainer.weights.source import Source
from trainer.weights.transport import Client, Sender, TransportFailed, in_background

GIVEN_UP = "steplog/given up"
"""A key in the group's store: the trainer has left, so workers need not wait for more."""
NO_NCCL = (
    "vLLM found no NCCL that it can use; it needs 2.29.7 or later (VLLM_NCCL_SO_PATH names it)"
)
GRACE_S = 5.0
"""After the engines' time to join, for their errors to arrive before ours."""


class NoNccl(Exception):
    """vLLM takes a library that it cannot use for none, and then every broadcast silently does nothing.
    Weights would be sent, confirmed and served that never came."""


class NcclTransport:
    """The trainer's tensors must be on its current CUDA device."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._settings = settings

    def join(self, client: Client, source: Source, workers: int) -> Sender:
        device = torch.cuda.current_device()
        noticing = _Noticing(client)

        def make() -> Any:
            torch.cuda.set_device(device)  # a thread begins with the first one
            return self._make(noticing, source, workers)

        made = in_background(make)
        made.add_done_callback(lambda _: noticing.over.set())
        noticing.over.wait(self._settings.weights_join_s + GRACE_S)
        if noticing.error is not None:
            raise noticing.error
        if not made.done():
            raise TransportFailed("the process group did not come together in time")
        try:
            engine = made.result()
        except RuntimeError as error:
            raise TransportFailed(f"the process group did not come together: {error}") from error
        if engine.model_update_group.disabled:
            raise NoNccl(f"the trainer cannot send weights: {NO_NCCL}")
        return NcclSender(engine)

    def _make(self, client: Client, source: Source, workers: int) -> Any:
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


class Guarded:
    """A communicator that another thread may end. NCCL frees it with the abort, while whoever waited in
    a broadcast comes back and would go on with the next one: that is refused, and not a crash."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ended = False
        self._calling = threading.Lock()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        with self._calling:
            if self.ended:
                raise RuntimeError("the process group was given up")
            self.group.broadcast(tensor, src, stream)

    def end(self) -> None:
        # A broadcast is only enqueued under the lock, so it is held for an instant.
        with self._calling:
            if self.ended:
                return
            self.ended = True
        self.group.destroy()  # it aborts, which lets the waiting kernels end


class NcclSender:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._group = engine.model_update_group = Guarded(engine.model_update_group)

    def send_weights(self) -> None:
        try:
            self._engine.send_weights()
        except RuntimeError as error:  # NCCL's and CUDA's; the client's are of another kind
            raise TransportFailed(f"the transfer broke off: {error}") from error

    def abort(self) -> None:
        if not self._group.ended:
            with suppress(RuntimeError):
                self._group.group.group.store.set(GIVEN_UP, b"1")
            self._group.end()

    def shutdown(self) -> None:
        self.abort()
        self._engine.model_update_group = None


class _Noticing:
    """A client whose failure to join is noticed while our own side still waits for the others."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.over = threading.Event()
        self.error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self._client.init_weight_transfer_engine(init_info)
        except BaseException as error:
            self.error = error
            self.over.set()
            raise


def _free_port(host: str) -> int:
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
