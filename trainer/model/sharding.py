"""Places a model on its device or ranks, with the float32 weights that the optimizer updates.

An update of 1e-6 would be lost in a bf16 weight, so the optimizer always works on float32 master
weights. In one process on a GPU the model computes with bf16 copies of them, and gradients are
accumulated in float32. On several ranks FSDP2 holds shards of the master weights and casts them while
it gathers. On CPUs the model computes in float32, and its weights are the master weights.

Gradients of ranks are summed, not averaged: token weights already refer to the whole batch.
"""

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainer.model.packed import PackedModel

Tensor = Any


class Ranks:
    """The processes that train together; one process alone is rank 0 of 1."""

    def __init__(self) -> None:
        is_joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_joined else 0
        self.world = dist.get_world_size() if is_joined else 1


def join() -> Ranks:
    """Joins the other ranks, if torchrun has started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        # CPU tensors, such as the loop's numbers, use gloo, so that they do not wait for the GPU.
        cuda = torch.cuda.is_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Ranks()


def leave() -> None:
    """Leaves the process group after a successful run. Otherwise one of its threads may still be
    freeing tensors while the interpreter shuts down, which aborts the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_of_rank() -> Any:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device(
        "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    )
    torch.cuda.set_device(device)
    return device


class TrainedParameters(Protocol):
    """The float32 parameters that are trained."""

    parameters: dict[str, Tensor]
    """By name; gradients are accumulated on them."""

    def publish(self) -> None:
        """Copies the updated parameters to the model."""


class OwnWeights:
    """The model's own weights, in float32."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = trainable_parameters(model)

    def publish(self) -> None:
        """Nothing to do: they are the model's weights."""


class ShardedWeights:
    """This rank's shards of the model's own weights."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.parameters = trainable_parameters(model)

    def publish(self) -> None:
        # A pass without gradients leaves the outermost weights gathered, with their old values.
        self._model.reshard()


class MasterWeights:
    """float32 copies of the trained weights of a model that computes in lower precision."""

    def __init__(self, model: nn.Module, dtype: Any) -> None:
        self._copies = trainable_parameters(model)
        self.parameters = {
            name: nn.Parameter(copy.detach().float()) for name, copy in self._copies.items()
        }
        # Parameters only: buffers, such as the position frequencies, must stay float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        for name, copy in self._copies.items():
            copy.register_post_accumulate_grad_hook(_accumulate_into(self.parameters[name]))

    def publish(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self._copies.values()), list(self.parameters.values()))


def place_model(
    model: PackedModel,
    dtype: Any,
    device: Any,
    ranks: Ranks,
    *,
    shard: bool,
    read_weights: Callable[[], None] = lambda: None,
) -> TrainedParameters:
    """Moves a float32 model to its device, sharded if there are several ranks. If its parameters are on
    the meta device, `read_weights` has to give them their values."""
    is_sharded = shard or ranks.world > 1
    if is_sharded:
        _shard(model, dtype, device)
    _move(model, device)
    read_weights()
    if is_sharded:
        return ShardedWeights(model)
    return OwnWeights(model) if dtype == torch.float32 else MasterWeights(model, dtype)


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def gather(tensor: Tensor) -> Tensor:
    """The full tensor of a weight that may be sharded; every rank has to call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _move(model: PackedModel, device: Any) -> None:
    """Moves a model to its device, where parameters from the meta device get memory, but no values."""

    def move(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    # With this switch parameters stay the same objects, so that tied ones stay tied.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(move)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _shard(model: PackedModel, dtype: Any, device: Any) -> None:
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    # Inputs are not cast: temperatures and positions must not become bf16.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in (model, *model.layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _accumulate_into(master: Tensor) -> Any:
    def add(copy: Tensor) -> None:
        if master.grad is None:
            master.grad = copy.grad.float()
        else:
            master.grad.add_(copy.grad)
        copy.grad = None

    return add
