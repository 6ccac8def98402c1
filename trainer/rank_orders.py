"""Orders from rank 0 to the other trainer ranks, and the loop that executes them.

Rank 0 decides, writes and talks to engines. The other ranks take part only in what all ranks do
together: training, gathering weights, saving. Orders are bytes, never pickles.
"""

from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pool.core.ledger import GroupId
from pool.core.versions import Version
from schemas import Codec, Decision
from trainer.model.sharding import Ranks
from trainer.training import DecisionTraining
from trainer.weights.fleet import EngineFleet

KIND_BYTES = 16
LENGTH_BYTES = 8


class Order(NamedTuple):
    kind: str
    content: bytes = b""


class TrainOrder(msgspec.Struct):
    """Content of the order `train`."""

    decision: bytes
    lost: list[GroupId]
    trace: str = ""


class RankOrders:
    """Broadcasts orders; with a single rank it does nothing. A rank that receives nothing for half an
    hour fails with torch's timeout, so rank 0 also sends orders while it waits."""

    def __init__(self, ranks: Ranks) -> None:
        self._is_single = ranks.world == 1

    def send(self, kind: str, content: bytes = b"") -> None:
        if self._is_single:
            return
        head = kind.encode().ljust(KIND_BYTES) + len(content).to_bytes(LENGTH_BYTES, "little")
        _broadcast(bytearray(head))
        if content:
            _broadcast(bytearray(content))

    def receive(self) -> Order:
        head = _broadcast(bytearray(KIND_BYTES + LENGTH_BYTES))
        length = int.from_bytes(head[KIND_BYTES:], "little")
        content = _broadcast(bytearray(length)) if length else bytearray()
        return Order(head[:KIND_BYTES].decode().rstrip(), bytes(content))


def execute_orders(
    orders: RankOrders, training: DecisionTraining, fleet: EngineFleet, codec: Codec
) -> None:
    """The loop of non-zero ranks: executes the orders of rank 0 until `stop`."""
    while True:
        order = orders.receive()
        match order.kind:
            case "train":
                content = msgspec.msgpack.decode(order.content, type=TrainOrder)
                decision = codec.decode(content.decision)
                assert isinstance(decision, Decision)
                training.train(decision, set(content.lost), content.trace)
            case "sync":
                version = Version.parse(order.content.decode())
                assert version is not None
                fleet.sync(version)
            case "catch_up":
                fleet.catch_up()
            case "logprobs":
                training.learner.logprobs(np.frombuffer(order.content, np.int32))
            case "save":
                training.save()
            case "export":
                training.export_model()
            case "stop":
                training.writer.wait()
                return


def _broadcast(content: bytearray) -> bytearray:
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0)
    return content
