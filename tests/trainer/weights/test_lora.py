"""The adapter inside a worker of vLLM, without vLLM: what an update may change, and when."""

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.weights import lora

FIRST = {"up.lora_A.weight": 1, "up.lora_B.weight": 2}
SECOND = {"up.lora_A.weight": 3, "up.lora_B.weight": 4}


class Tensor:
    def __init__(self, value: int) -> None:
        self.value = value

    def to(self, device: str, copy: bool) -> "Tensor":
        assert device == "cpu" and copy
        return Tensor(self.value)


class Manager:
    """vLLM's manager of adapters, with LoRA layers for one module."""

    def __init__(self) -> None:
        self.modules = {"up": None}
        self.loaded: list[Any] = []

    def remove_all_adapters(self) -> None:
        self.loaded.clear()

    def add_adapter(self, adapter: Any) -> None:
        if any(tensor.value < 0 for tensor in adapter.tensors.values()):
            raise RuntimeError("it does not fit")
        self.loaded.append(adapter)

    def activate_adapter(self, identity: int) -> None:
        assert identity == lora.ADAPTER_ID


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    def make_adapter(_: Any, tensors: dict[str, Any]) -> Any:
        return SimpleNamespace(tensors=tensors, loras={name.split(".")[0]: 0 for name in tensors})

    monkeypatch.setattr(lora, "make_adapter", make_adapter)
    monkeypatch.setattr(lora, "load_adapter_from_memory", lambda: None)
    return Manager()


def slot_of(manager: Manager, stages: int = 1) -> lora.AdapterSlot:
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    return lora.AdapterSlot(
        SimpleNamespace(lora_manager=manager), SimpleNamespace(parallel_config=parallel)
    )


def update(slot: lora.AdapterSlot, tensors: dict[str, int]) -> None:
    slot.start()
    slot.load_weights((name, Tensor(value)) for name, value in tensors.items())
    slot.complete()
    slot.finish()


def held(manager: Manager) -> dict[str, int]:
    return {name: tensor.value for name, tensor in getattr(manager, lora.RECEIVED).items()}


def test_an_update_replaces_the_adapter(manager: Manager) -> None:
    slot = slot_of(manager)
    update(slot, FIRST)
    update(slot, SECOND)
    assert held(manager) == SECOND
    assert not manager.loaded  # vLLM loads it with the next request


def test_an_interrupted_update_leaves_the_adapter_as_it_was(manager: Manager) -> None:
    slot = slot_of(manager)
    update(slot, FIRST)
    slot.start()
    slot.load_weights([("up.lora_A.weight", Tensor(3))])
    slot.finish()  # by the next trainer, which ends what the last one began
    assert held(manager) == FIRST
    update(slot, SECOND)
    assert held(manager) == SECOND


def test_an_adapter_that_cannot_be_loaded_is_not_kept(manager: Manager) -> None:
    slot = slot_of(manager)
    update(slot, FIRST)
    with pytest.raises(RuntimeError, match="it does not fit"):
        update(slot, {"up.lora_A.weight": -1})
    assert held(manager) == FIRST


def test_modules_without_lora_layers_are_named(manager: Manager) -> None:
    with pytest.raises(ValueError, match="no LoRA layers for 1 modules, such as down; leave them"):
        update(slot_of(manager), {"up.lora_A.weight": 1, "down.lora_A.weight": 1})
    # With pipeline parallelism the module may be in another worker.
    update(slot_of(manager, stages=2), {"down.lora_A.weight": 1})


def test_weights_of_a_whole_model_are_no_adapter() -> None:
    lora.check_is_adapter(list(FIRST))
    with pytest.raises(ValueError, match="takes only LoRA adapters"):
        lora.check_is_adapter(["model.norm.weight", *FIRST])
