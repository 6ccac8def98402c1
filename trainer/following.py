"""What every rank but the first does: what it is told."""

import msgspec
import numpy as np

from pool.core.versions import Version
from schemas import Codec, Decision
from trainer.orders import Orders
from trainer.training import Training, TrainOrder
from trainer.weights.fleet import Weights


def follow(orders: Orders, training: Training, weights: Weights, codec: Codec) -> None:
    """Until rank 0 stops."""
    while True:
        order = orders.hear()
        match order.kind:
            case "train":
                told = msgspec.msgpack.decode(order.content, type=TrainOrder)
                decision = codec.decode(told.decision)
                assert isinstance(decision, Decision)
                training.train(decision, set(told.lost), told.trace)
            case "sync":
                version = Version.parse(order.content.decode())
                assert version is not None
                weights.sync(version)
            case "tend":
                weights.tend()
            case "logprobs":
                training.learner.logprobs(np.frombuffer(order.content, np.int32))
            case "save":
                training.save()
            case "stop":
                return
