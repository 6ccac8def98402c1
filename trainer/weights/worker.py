"""The receiving side, inside vLLM's workers.

A worker that fails leaves its process group at once, so that no other waits for it; and it never
waits for others without a limit, because vLLM can do nothing else meanwhile, not even be told to stop.
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

from trainer.weights.gloo_group import Delivery, Meeting, Worker
from trainer.weights.nccl import GIVEN_UP, NO_NCCL, Guarded
from trainer.weights.transport import in_background

JOIN_S = 45.0
"""Less than the trainer waits by default, so that it hears of it."""
STALL_S = 120.0
"""Nothing has come for so long: NCCL itself would wait for ever."""
POLL_S = 0.2


class GlooEngine(WeightTransferEngine):
    """Weights by `trainer.weights.gloo_group`."""

    init_info_cls = Meeting
    update_info_cls = Delivery

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._worker: Worker | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self.shutdown()
        parallel = self.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._worker = Worker(init_info, place)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without the base's wait for an accelerator, which there need not be."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Delivery) -> None:
        if self._worker is None:
            raise RuntimeError("there is no process group: the trainer has to make one first")
        try:
            for tensors in self._worker.receive(update_info):
                self.model.load_weights([(name, self._placed(each)) for name, each in tensors])
        except BaseException:
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            # The CPU's matrix product works on its own packed copy. A head that is tied to the
            # embedding is not loaded itself, so its copy would silently keep the old weights.
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


class NcclEngine(NCCLWeightTransferEngine):
    """vLLM's own, with an end to its waiting.

    When an engine or the trainer dies, NCCL lets all others hang in their broadcast, and vLLM with
    them. Here the call fails instead, and the trainer can make a new group with this engine in it.
    """

    model_update_group: Any

    def init_transfer_engine(self, init_info: Any) -> None:
        self.shutdown()
        join = super().init_transfer_engine

        def apart() -> None:
            torch.accelerator.set_device_index(self.device)
            join(init_info)

        in_background(apart).result(timeout=JOIN_S)
        if self.model_update_group.disabled:
            self.model_update_group = None
            raise RuntimeError(NO_NCCL)

    def receive_weights(self, update_info: Any) -> None:
        group = self.model_update_group
        if group is None:
            raise RuntimeError("there is no process group: the trainer has to make one first")
        watched = Watched(group)
        self.model_update_group = watched
        try:
            super().receive_weights(update_info)
            torch.accelerator.synchronize()
        finally:
            watched.stop()
            self.model_update_group = group
            if watched.given_up:
                self.shutdown()
        if watched.given_up:
            raise RuntimeError("the process group was given up: the trainer ended it, or stalls")


class Watched:
    """A communicator that is aborted when the trainer says so in the group's store, when that store
    is gone, or when nothing has come for too long."""

    def __init__(self, group: Any) -> None:
        self._guarded = Guarded(group)
        self._store = group.group.store
        self._progress = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch weights", daemon=True)
        self._thread.start()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self._progress = time.monotonic()
        self._guarded.broadcast(tensor, src, stream)

    @property
    def given_up(self) -> bool:
        return self._guarded.ended

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            if time.monotonic() - self._progress > STALL_S or self._told():
                self._guarded.end()
                return

    def _told(self) -> bool:
        try:
            return bool(self._store.check([GIVEN_UP]))
        except RuntimeError:
            return True
