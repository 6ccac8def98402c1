"""What rank 0 tells the other ranks to do next.

Rank 0 decides, writes and talks to engines. The others take part in what all ranks do together:
training, gathering weights, saving. Orders are bytes, never pickles.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from trainer.model.sharding import Ranks

KIND_BYTES = 16
LENGTH_BYTES = 8


class Order(NamedTuple):
    kind: str
    content: bytes = b""


class Orders:
    """Silent where there is one rank only. Who hears nothing for half an hour stops, so rank 0 says
    something now and then."""

    def __init__(self, ranks: Ranks) -> None:
        self._alone = ranks.world == 1

    def give(self, kind: str, content: bytes = b"") -> None:
        if self._alone:
            return
        head = kind.encode().ljust(KIND_BYTES) + len(content).to_bytes(LENGTH_BYTES, "little")
        _broadcast(bytearray(head))
        if content:
            _broadcast(bytearray(content))

    def hear(self) -> Order:
        head = _broadcast(bytearray(KIND_BYTES + LENGTH_BYTES))
        length = int.from_bytes(head[KIND_BYTES:], "little")
        content = _broadcast(bytearray(length)) if length else bytearray()
        return Order(head[:KIND_BYTES].decode().rstrip(), bytes(content))


def _broadcast(content: bytearray) -> bytearray:
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0)
    return content
