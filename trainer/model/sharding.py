"""Who holds the float32 weights that the optimiser changes.

A step of 1e-6 is lost when it is added to a bf16 weight, so the optimiser always has float32. In one
process on a GPU the model computes with bf16 copies of these masters, and gradients are added up in
float32; on several ranks FSDP2 holds shards of the masters and casts while it gathers; on CPUs the
model computes in float32, and weights and masters are the same tensors.

Gradients of ranks are summed, not averaged: the weights of tokens are those of the whole batch.
"""

import os
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainer.model.packed import PackedModel

Tensor = Any
Floats = NDArray[np.float64]


class Ranks:
    """The processes that train together; one process alone is rank 0 of 1."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1

    def total(self, vector: Floats) -> Floats:
        """The sum over all ranks; every rank has to call it."""
        return self._reduced(vector, "SUM")

    def most(self, vector: Floats) -> Floats:
        return self._reduced(vector, "MAX")

    def _reduced(self, vector: Floats, how: str) -> Floats:
        if self.world == 1:
            return vector
        tensor = torch.from_numpy(np.array(vector, np.float64))
        dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
        return np.asarray(tensor.numpy(), np.float64)


def join() -> Ranks:
    """Joins the ranks that torchrun has started, if it has."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        # Numbers of the loop travel over gloo, so that they need not wait for the GPU.
        cuda = torch.cuda.is_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Ranks()


def leave() -> None:
    """At a good end. A thread of the group may still be putting tensors away, for which it needs the
    interpreter: one that ends meanwhile aborts the process."""
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


class Held(Protocol):
    """The weights that are trained."""

    parameters: dict[str, Tensor]
    """float32, by name; gradients arrive on them."""

    def publish(self) -> None:
        """Gives the model what the optimiser has made."""


class Plain:
    """The model's own weights."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = trainable(model)

    def publish(self) -> None:
        """They are the model's already."""


class Shards:
    """This rank's part of the model's own weights."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.parameters = trainable(model)

    def publish(self) -> None:
        # A pass without gradients leaves the outermost weights gathered, as they were then.
        self._model.reshard()


class Masters:
    """float32 copies of the trained weights of a model that computes in less."""

    def __init__(self, model: nn.Module, dtype: Any) -> None:
        self._copies = trainable(model)
        self.parameters = {
            name: nn.Parameter(copy.detach().float().clone()) for name, copy in self._copies.items()
        }
        # Parameters only: a buffer, such as the frequencies of positions, is float32 for a reason.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        for name, copy in self._copies.items():
            copy.register_post_accumulate_grad_hook(_adding_to(self.parameters[name]))

    def publish(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self._copies.values()), list(self.parameters.values()))


def hold(model: PackedModel, dtype: Any, device: Any, ranks: Ranks, *, shard: bool) -> Held:
    """Moves a float32 model to its device, in shards where there are several ranks."""
    if shard or ranks.world > 1:
        _shard(model, dtype, device)
        return Shards(model)
    model.to(device)
    return Plain(model) if dtype == torch.float32 else Masters(model, dtype)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def whole(tensor: Tensor) -> Tensor:
    """All of a weight that may be sharded; every rank has to call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _shard(model: PackedModel, dtype: Any, device: Any) -> None:
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    # Inputs stay as they are: temperatures and positions must not become bf16.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # This also moves them: one layer after the other, so that no rank ever holds the whole model.
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in (model, *model.layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _adding_to(master: Tensor) -> Any:
    def add(copy: Tensor) -> None:
        if master.grad is None:
            master.grad = copy.grad.float()
        else:
            master.grad.add_(copy.grad)
        copy.grad = None

    return add
