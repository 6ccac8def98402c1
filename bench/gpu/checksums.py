"""Checksums of all parameters of a running vLLM, to be compared with the trainer's.

vLLM stores some matrices stacked: queries, keys and values in one, gate and up in one. So a checksum is
made of one number for each line of a matrix, and lines of stacked matrices follow one another.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

LINES = 4096
"""Lines that are summed at once, which bounds the memory."""
STACKED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class ChecksumWorker:
    """Added to vLLM's workers by --worker-extension-cls; called through /collective_rpc."""

    def checksums(self) -> dict[str, str]:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        # On CPUs, vLLM keeps only a packed copy of some matrices, and their parameters are empty.
        return {
            name: checksum([parameter])
            for name, parameter in model.named_parameters()
            if parameter.numel()
        }


def checksum(parts: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        matrix = part.detach() if part.ndim > 1 else part.detach()[:, None]
        for lines in matrix.split(LINES):
            digest.update(_sum_lines(lines.contiguous()).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sum_lines(lines: Any) -> Any:
    """One number for each line, in which every byte counts by its place."""
    octets = lines.view(torch.uint8).to(torch.int64)
    places = torch.arange(1, octets.shape[1] + 1, device=octets.device)
    return (octets * places).sum(dim=1)


def find_differences(ours: Any, theirs: dict[str, str]) -> list[str]:
    """Names of vLLM's parameters that differ from those of our model, or that it does not have."""
    parameters = dict(ours.named_parameters())
    return [name for name, value in theirs.items() if _expected(parameters, name) != value]


def _expected(parameters: dict[str, Any], name: str) -> str | None:
    for stacked, parts in STACKED.items():
        if stacked in name:
            return checksum([parameters[name.replace(stacked, part)] for part in parts])
    return checksum([parameters[name]]) if name in parameters else None
