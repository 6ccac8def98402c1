"""Lets several trainer ranks read the weights together while rank 0 sends them to the engines.

Reading the weights gathers shards, which every rank must take part in. So rank 0 announces each pass
before it starts, with the number of the source that it reads, and completes every pass that it started,
even if sending failed half way. The other ranks read along until rank 0 broadcasts its report.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer.weights.source import Parameter, WeightSource


class SingleRank:
    """The only rank: there is no other to synchronize with."""

    is_leader = True
    is_single = True

    def announce_pass(self, source: int) -> None: ...

    def send_report(self, report: bytes) -> None: ...

    def receive(self) -> bytes | int:
        raise RuntimeError("a single rank receives no reports")


class RankGroup:
    """The ranks of a torch process group, by default the global one."""

    is_single = False

    def __init__(self, device: Any = "cpu", group: Any = None) -> None:
        self.is_leader = dist.get_rank(group) == 0
        self._leader = dist.get_global_rank(group, 0) if group is not None else 0
        self._device = device
        self._group = group

    def announce_pass(self, source: int) -> None:
        """Tells the other ranks that a pass over this source starts."""
        self._broadcast(torch.tensor([-source], dtype=torch.int64))

    def send_report(self, report: bytes) -> None:
        """Tells the other ranks that no more passes follow, and sends them the report."""
        self._broadcast(torch.tensor([len(report)], dtype=torch.int64))
        self._broadcast(torch.frombuffer(bytearray(report), dtype=torch.uint8))

    def receive(self) -> bytes | int:
        """The report, or the number of the source if another pass starts."""
        length = int(self._broadcast(torch.zeros(1, dtype=torch.int64)).item())
        if length <= 0:
            return -length
        report = self._broadcast(torch.zeros(length, dtype=torch.uint8))
        return bytes(report.cpu().tolist())

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self._device)
        dist.broadcast(tensor, self._leader, group=self._group)
        return tensor


class AnnouncedSource:
    """The weights as rank 0 reads them: every pass is announced to the other ranks."""

    def __init__(
        self, source: WeightSource, ranks: SingleRank | RankGroup, number: int = 0
    ) -> None:
        """`number` is the place of the source among those that the other ranks have."""
        self._source = source
        self._ranks = ranks
        self._number = number
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.passes = 0

    def metadata(self) -> list[Parameter]:
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.complete_pass()
        self._ranks.announce_pass(self._number)
        self.passes += 1
        self._pass = iter(self._source)
        return self._pass

    def complete_pass(self) -> None:
        """Reads the rest of a pass that was interrupted, as the other ranks do."""
        if not self._ranks.is_single:
            for _ in self._pass:
                pass


def read_along(sources: Sequence[WeightSource], ranks: SingleRank | RankGroup) -> bytes:
    """What non-zero ranks do while rank 0 sends: read along until the report comes."""
    while isinstance(message := ranks.receive(), int):
        for _ in sources[message]:
            pass
    return message
