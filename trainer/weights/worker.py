"""The receiving side of the weight transfer, inside vLLM's workers.

A worker that fails leaves its process group at once, so that no other waits for it. It never waits
without a time limit, because vLLM can do nothing else meanwhile, not even handle a stop.
"""

import threading
import time
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from trainer.weights.gloo_group import GlooInit, GlooReceiver, GlooUpdate
from trainer.weights.lora import AdapterSlot, check_is_adapter
from trainer.weights.nccl import GIVEN_UP, NO_NCCL, GuardedCommunicator
from trainer.weights.transport import in_background

JOIN_S = 45.0
"""Shorter than the trainer waits by default, so that the trainer receives the error."""
STALL_S = 120.0
"""Seconds without data after which a transfer is aborted; NCCL itself would wait forever."""
POLL_S = 0.2


class AdapterUpdates(WeightTransferEngine):
    """Lets updates of an engine with LoRA layers go to its adapter, and not to its model."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        has_lora = vllm_config.lora_config is not None
        self._adapter = AdapterSlot(model, vllm_config) if has_lora else None

    def start_weight_update(self) -> None:
        if self._adapter is None:
            super().start_weight_update()
        else:
            self._adapter.start()
            self.set_weight_update_target(self._adapter, self.model_config)

    def receive_weights(self, update_info: Any) -> None:
        if self._adapter is not None:
            check_is_adapter(update_info.names)
        super().receive_weights(update_info)
        if self._adapter is not None:
            self._adapter.complete()

    def finish_weight_update(self) -> None:
        if self._adapter is None:
            super().finish_weight_update()
        else:
            self._adapter.finish()


class GlooReceiving(WeightTransferEngine):
    """Receives weights through `trainer.weights.gloo_group`."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver: GlooReceiver | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self.shutdown()
        parallel = self.parallel_config
        worker_index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = GlooReceiver(init_info, worker_index)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Unlike the base class, does not require an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if self._receiver is None:
            raise RuntimeError("there is no process group; the trainer has to form one first")
        try:
            for tensors in self._receiver.receive(update_info):
                self.model.load_weights(
                    [(name, tensor.to(self.device)) for name, tensor in tensors]
                )
        except BaseException:
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            # On CPUs, matrix products use a packed copy of the weights. A head that is tied to the
            # embedding is not loaded itself, so its copy would silently keep the old weights.
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


class GlooEngine(AdapterUpdates, GlooReceiving):
    """The engine of `"backend": "gloo"`."""


class NcclReceiving(NCCLWeightTransferEngine):
    """vLLM's own NCCL engine, extended by time limits.

    When an engine or the trainer dies, NCCL lets all others hang in their broadcast, and vLLM with
    them. Here the call fails instead, and the trainer can form a new group with this engine in it.
    """

    model_update_group: Any

    def init_transfer_engine(self, init_info: Any) -> None:
        self.shutdown()
        join = super().init_transfer_engine

        def join_on_device() -> None:
            torch.accelerator.set_device_index(self.device)
            join(init_info)

        in_background(join_on_device).result(timeout=JOIN_S)
        if self.model_update_group.disabled:
            self.model_update_group = None
            raise RuntimeError(NO_NCCL)

    def receive_weights(self, update_info: Any) -> None:
        group = self.model_update_group
        if group is None:
            raise RuntimeError("there is no process group; the trainer has to form one first")
        watched = WatchedCommunicator(group)
        self.model_update_group = watched
        try:
            super().receive_weights(update_info)
            torch.accelerator.synchronize()
        finally:
            watched.stop()
            self.model_update_group = group
            if watched.is_aborted:
                self.shutdown()
        if watched.is_aborted:
            raise RuntimeError(
                "the process group was aborted: the trainer ended it, or sent nothing for too long"
            )


class NcclEngine(AdapterUpdates, NcclReceiving):
    """The engine of `"backend": "steplog_nccl"`."""


class WatchedCommunicator:
    """A communicator that is aborted when the trainer sets GIVEN_UP in the group's store, when that
    store is gone, or when no data came for too long."""

    def __init__(self, group: Any) -> None:
        self._guarded = GuardedCommunicator(group)
        self._store = group.group.store
        self._last_data = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch weights", daemon=True)
        self._thread.start()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self._last_data = time.monotonic()
        self._guarded.broadcast(tensor, src, stream)

    @property
    def is_aborted(self) -> bool:
        return self._guarded.is_ended

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            if time.monotonic() - self._last_data > STALL_S or self._is_given_up():
                self._guarded.end()
                return

    def _is_given_up(self) -> bool:
        try:
            return bool(self._store.check([GIVEN_UP]))
        except RuntimeError:
            return True
