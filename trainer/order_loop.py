"""The loop of non-zero ranks: executes the orders of rank 0."""

import numpy as np

from pool.core.versions import Version
from schemas import Codec
from trainer.preparation import BatchPreparation
from trainer.rank_orders import BatchOrder, LogprobsOrder, RankOrders
from trainer.training import DecisionTraining
from trainer.weights.fleet import EngineFleet


def execute_orders(
    orders: RankOrders,
    training: DecisionTraining,
    preparation: BatchPreparation,
    fleet: EngineFleet,
    codec: Codec,
) -> None:
    """Returns when rank 0 sends `stop`."""
    while True:
        order = orders.receive()
        match order.kind:
            case "train":
                batch = BatchOrder.decode(order.content)
                prepared = preparation.take(batch.decision_of(codec), set(batch.withdrawn))
                training.train(prepared, batch.trace)
            case "sync":
                version = Version.parse(order.content.decode())
                assert version is not None
                fleet.sync(version)
            case "catch_up":
                fleet.catch_up()
            case "logprobs":
                asked = LogprobsOrder.decode(order.content)
                training.learner.logprobs(np.frombuffer(asked.ids, np.int32), asked.temperature)
            case "save":
                training.save()
            case "export":
                training.export_model()
            case "stop":
                training.writer.wait()
                return
