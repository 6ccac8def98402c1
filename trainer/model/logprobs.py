"""Log-probs of given ids, computed without holding the logits of a whole pack.

The output head runs over one chunk of positions at a time, in the forward and again in the backward
pass, so that only a chunk of logits exists at once: a pack of 32,000 ids with a vocabulary of 150,000
would take 20 GB. Logits are divided by the temperature of their position, and the log-softmax is
float32, whatever the model computes in. If everything fits into one chunk, its logits are kept and not
computed twice.
"""

from typing import Any

import torch

Tensor = Any

CHUNK_BYTES = {"cuda": 2 * 2**30, "cpu": 32 * 2**20}
"""Size of a chunk of float32 logits. On GPUs, the gradient of the head is accumulated once per chunk,
so few chunks are better; on CPUs, a chunk should fit into the cache."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    fp32: bool = False,
    compiled: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, with gradient, and entropy at each position, without.

    `fp32` multiplies with the head in float32. `chunk` is the number of positions per chunk, by default
    computed from CHUNK_BYTES.
    """
    if fp32:
        hidden, weight = hidden.float(), weight.float()
    if chunk is None:
        chunk = max(CHUNK_BYTES[hidden.device.type] // (4 * weight.shape[0]), 16)
    logprobs, entropy = _TokenLogprobs.apply(
        hidden, weight, bias, targets, temperatures, chunk, compiled
    )
    return logprobs, entropy


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from logits that the model has computed itself."""
    spread = (logits.float() / temperatures[:, None]).log_softmax(-1)
    entropy = -(spread.exp() * spread).sum(-1)
    return spread.gather(1, targets[:, None])[:, 0], entropy.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        chunk: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.chunk, ctx.compiled = chunk, compiled
        reduce = _compiled(_reduce_logits) if compiled else _reduce_logits
        ctx.kept = None
        logprob = hidden.new_empty(len(hidden), dtype=torch.float32)
        normaliser, entropy = torch.empty_like(logprob), torch.empty_like(logprob)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias)
            reduced = reduce(logits, targets[part], temperatures[part])
            logprob[part], normaliser[part], entropy[part] = reduced
            if len(hidden) <= chunk:
                ctx.kept = logits
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normaliser)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, _by_entropy: Any) -> Any:
        hidden, weight, bias, targets, temperatures, normaliser = ctx.saved_tensors
        gradient = _compiled(_gradient) if ctx.compiled else _gradient
        by_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        by_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, bias) if ctx.kept is None else ctx.kept
            by_logits = gradient(
                logits,
                targets[part],
                temperatures[part],
                normaliser[part],
                by_logprob[part],
                hidden.dtype,
            )
            if by_hidden is not None:
                by_hidden[part] = by_logits @ weight
            if by_weight is not None:
                _add_product(by_weight, by_logits, hidden[part])
            if by_bias is not None:
                by_bias += by_logits.sum(0, dtype=torch.float32)
        return by_hidden, _like(by_weight, weight), _like(by_bias, bias), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 logits; on GPUs they are never rounded to bf16 in between."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = (hidden @ weight.T).float()
    return logits if bias is None else logits + bias


def _reduce_logits(
    logits: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = logits / temperatures[:, None]
    normaliser = scaled.logsumexp(-1)
    logprob = scaled.gather(1, targets[:, None])[:, 0] - normaliser
    spread = scaled - normaliser[:, None]
    return logprob, normaliser, -(spread.exp() * spread).sum(-1)


def _gradient(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    normaliser: Tensor,
    by_logprob: Tensor,
    dtype: Any,
) -> Tensor:
    spread = logits / temperatures[:, None] - normaliser[:, None]
    share = -by_logprob[:, None] * spread.exp()
    if logits.is_cuda:  # compiled, this is one pass over the logits; a scatter would be another
        hit = torch.arange(logits.shape[1], device=logits.device)[None, :] == targets[:, None]
        share = share + torch.where(hit, by_logprob[:, None], 0.0)
    else:
        share.scatter_add_(1, targets[:, None], by_logprob[:, None])
    return (share / temperatures[:, None]).to(dtype)


def _add_product(total: Tensor, by_logits: Tensor, hidden: Tensor) -> None:
    if hidden.is_cuda and hidden.dtype != torch.float32:
        total += torch.mm(by_logits.T, hidden, out_dtype=torch.float32)
    else:
        total += by_logits.T @ hidden


def _like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)


_programs: dict[Any, Any] = {}


def _compiled(function: Any) -> Any:
    if function not in _programs:
        _programs[function] = torch.compile(function, dynamic=True)
    return _programs[function]
