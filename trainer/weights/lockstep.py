"""Several trainer ranks, one of which talks to the engines.

Reading the source gathers shards, in which every rank takes part. So rank 0 announces each pass before
it begins and finishes every pass that it began, also one that failed half way; the others read along
until it tells them how it went.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainer.weights.source import Parameter, Source


class Alone:
    """The only rank: there is nobody to tell."""

    leads = True
    alone = True

    def announce(self) -> None: ...

    def tell(self, report: bytes) -> None: ...

    def hear(self) -> bytes | None:
        raise RuntimeError("a single rank has nobody to listen to")


class Ranks:
    """The ranks of a torch process group, by default of all."""

    alone = False

    def __init__(self, device: Any = "cpu", group: Any = None) -> None:
        self.leads = dist.get_rank(group) == 0
        self._first = dist.get_global_rank(group, 0) if group is not None else 0
        self._device = device
        self._group = group

    def announce(self) -> None:
        """Another pass begins."""
        self._share(torch.zeros(1, dtype=torch.int64))

    def tell(self, report: bytes) -> None:
        """No more passes; this is what came of them."""
        self._share(torch.tensor([len(report)], dtype=torch.int64))
        self._share(torch.frombuffer(bytearray(report), dtype=torch.uint8))

    def hear(self) -> bytes | None:
        """None: another pass."""
        length = int(self._share(torch.zeros(1, dtype=torch.int64)).item())
        if not length:
            return None
        report = self._share(torch.zeros(length, dtype=torch.uint8))
        return bytes(report.cpu().tolist())

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self._device)
        dist.broadcast(tensor, self._first, group=self._group)
        return tensor


class Announced:
    """The source as rank 0 reads it."""

    def __init__(self, source: Source, ranks: Alone | Ranks) -> None:
        self._source = source
        self._ranks = ranks
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.passes = 0

    def metadata(self) -> list[Parameter]:
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.end()
        self._ranks.announce()
        self.passes += 1
        self._pass = iter(self._source)
        return self._pass

    def end(self) -> None:
        """Reads the rest of a pass that broke off."""
        if not self._ranks.alone:
            for _ in self._pass:
                pass


def read_along(source: Source, ranks: Alone | Ranks) -> bytes:
    """What every rank but the first does meanwhile."""
    while (report := ranks.hear()) is None:
        for _ in source:
            pass
    return report
