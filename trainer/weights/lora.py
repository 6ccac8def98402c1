"""LoRA inside vLLM: the adapter that the trainer sent last, for all requests of an engine.

vLLM lets each request name an adapter, and loads it from a file. An engine that was started with
`--enable-lora` and one of our transfer engines has one adapter instead. It comes from the trainer like
any other weights, and every request that names no other uses it, also one that runs over an update. So
the version label of an engine holds for all of its requests. Before the first update the adapter is
zero, and the engine computes with the weights that it has loaded.
"""

from collections.abc import Collection
from functools import wraps
from typing import Any

ADAPTER_NAME = "steplog"
ADAPTER_ID = 2**30
"""Far from the ids that vLLM gives to adapters, which count from 1."""
IN_MEMORY = "steplog: received from the trainer"
"""Where the adapter is, in place of a path."""
RECEIVED = "steplog_adapter"
"""The attribute of vLLM's adapter manager that keeps the adapter, because vLLM drops loaded ones."""


def add_adapter_to_requests(backends: Collection[str]) -> None:
    """Makes vLLM give the adapter to every request that names none, in engines that have LoRA layers
    and one of these backends."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.preprocess_add_request
    if hasattr(original, "__wrapped__"):
        return  # vLLM may load plugins more than once

    def takes_adapter(config: Any) -> bool:
        transfer = config.weight_transfer_config
        return config.lora_config is not None and transfer and transfer.backend in backends

    @wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if request.lora_request is None and takes_adapter(self.vllm_config):
            request.lora_request = LoRARequest(ADAPTER_NAME, ADAPTER_ID, IN_MEMORY)
        return original(self, request)

    EngineCore.preprocess_add_request = preprocess_add_request


def load_adapter_from_memory() -> None:
    """Makes a worker of vLLM load the adapter from its memory. vLLM loads it when it is used for the
    first time, and again after every update."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    original = WorkerLoRAManager._load_adapter
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def _load_adapter(self: Any, request: Any) -> Any:
        manager = self._adapter_manager
        if request.lora_path != IN_MEMORY:
            return original(self, request)
        if not hasattr(manager, RECEIVED):
            rank = self.get_dummy_lora_warmup_rank(min(8, self.lora_config.max_lora_rank))
            return manager.create_dummy_lora(ADAPTER_ID, rank, self.embedding_modules)
        return make_adapter(manager, getattr(manager, RECEIVED))

    WorkerLoRAManager._load_adapter = _load_adapter


def make_adapter(manager: Any, tensors: dict[str, Any]) -> Any:
    """An adapter in the form that vLLM loads, from tensors by name."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    rank = max(min(tensor.shape) for tensor in tensors.values())
    # Alpha equals the rank, because the scaling is in matrix B already.
    config = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    config.validate_legal(manager.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        dict(tensors),
        config,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )


def check_is_adapter(names: list[str]) -> None:
    """Refuses the weights of a whole model."""
    if not all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names):
        raise ValueError(
            "this engine was started with --enable-lora and takes only LoRA adapters: set the "
            "trainer's lora_rank, or restart the engine without --enable-lora"
        )


class AdapterSlot:
    """Takes the place of the model in an update: what is loaded into it becomes the adapter."""

    def __init__(self, model: Any, config: Any) -> None:
        self._manager = model.lora_manager
        self._may_lack_layers = config.parallel_config.pipeline_parallel_size > 1
        self._arriving: dict[str, Any] = {}
        self._is_complete = False
        load_adapter_from_memory()

    def start(self) -> None:
        self._arriving, self._is_complete = {}, False

    def load_weights(self, weights: Any) -> None:
        """The name is that of the model's own method. Buffers are used again, so tensors are copied."""
        for name, tensor in weights:
            self._arriving[name] = tensor.to("cpu", copy=True)

    def complete(self) -> None:
        """Notes that all tensors of the update have arrived."""
        self._is_complete = True

    def finish(self) -> None:
        """Replaces the adapter. An update that was interrupted changes nothing."""
        arrived, is_complete = self._arriving, self._is_complete
        self.start()
        if not is_complete:
            return
        self._check(make_adapter(self._manager, arrived))
        setattr(self._manager, RECEIVED, arrived)

    def _check(self, adapter: Any) -> None:
        """Loads the adapter once, so that a fault shows now, and not in the middle of a request."""
        self._manager.remove_all_adapters()
        try:
            self._manager.add_adapter(adapter)
            self._manager.activate_adapter(ADAPTER_ID)
        finally:
            self._manager.remove_all_adapters()
        unknown = adapter.loras.keys() - self._manager.modules.keys()
        if unknown and not self._may_lack_layers:
            raise ValueError(
                f"this engine has no LoRA layers for {len(unknown)} modules, such as {min(unknown)}; "
                "leave them out of the trainer's --lora-targets"
            )
