"""Orders from rank 0 to the other trainer ranks. They are bytes, never pickles.

Rank 0 decides, writes and talks to engines. The other ranks take part only in what all ranks do
together: training, gathering weights, saving.
"""

from typing import Any, NamedTuple, Self

import msgspec
import torch
import torch.distributed as dist

from pool.core.ledger import GroupId
from schemas import Codec, Decision
from trainer.model.sharding import Ranks

KIND_BYTES = 16
LENGTH_BYTES = 8


class Order(NamedTuple):
    kind: str
    content: bytes = b""


class BatchOrder(msgspec.Struct, frozen=True):
    """Content of orders about a batch: its Decision, and the groups of it that Kafka has deleted."""

    decision: bytes
    withdrawn: list[GroupId]
    trace: str = ""

    @classmethod
    def of(cls, codec: Codec, decision: Decision, withdrawn: set[GroupId], trace: str = "") -> Self:
        return cls(codec.encode(decision), sorted(withdrawn), trace)

    @classmethod
    def decode(cls, content: bytes) -> Self:
        return msgspec.msgpack.decode(content, type=cls)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def decision_of(self, codec: Codec) -> Decision:
        decision = codec.decode(self.decision)
        assert isinstance(decision, Decision)
        return decision


class LogprobsOrder(msgspec.Struct, frozen=True):
    """Content of the order `logprobs`."""

    ids: bytes
    temperature: float

    @classmethod
    def decode(cls, content: bytes) -> Self:
        return msgspec.msgpack.decode(content, type=cls)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


class RankOrders:
    """Broadcasts orders; with a single rank it does nothing. A rank that receives nothing for half an
    hour fails with torch's timeout, so rank 0 also sends orders while it waits."""

    def __init__(self, ranks: Ranks, group: Any = None) -> None:
        """`group` is the process group that carries the orders, by default the global one."""
        self._is_single = ranks.world == 1
        self._group = group

    def send(self, kind: str, content: bytes = b"") -> None:
        if self._is_single:
            return
        head = kind.encode().ljust(KIND_BYTES) + len(content).to_bytes(LENGTH_BYTES, "little")
        self._broadcast(bytearray(head))
        if content:
            self._broadcast(bytearray(content))

    def receive(self) -> Order:
        head = self._broadcast(bytearray(KIND_BYTES + LENGTH_BYTES))
        length = int.from_bytes(head[KIND_BYTES:], "little")
        content = self._broadcast(bytearray(length)) if length else bytearray()
        return Order(head[:KIND_BYTES].decode().rstrip(), bytes(content))

    def _broadcast(self, content: bytearray) -> bytearray:
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0, group=self._group)
        return content
