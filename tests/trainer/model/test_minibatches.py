"""Packs that a batch is split into for training."""

import torch

from schemas import Record, StepAdvantages
from schemas.packing import pack_logprobs
from tests.pool.records import end, group_of, step
from tests.trainer.data.test_batch import batch_of
from trainer.algorithm.settings import LossSettings
from trainer.model.minibatches import BatchSplitter
from trainer.model.sharding import Ranks


def test_a_token_has_the_advantage_that_its_environment_gave_else_its_trajectorys() -> None:
    records: list[Record] = []
    for uid, reward in (("a", 0.0), ("b", 1.0)):
        records += [
            step(f"{uid}1", uid, ids=[1], response=(2, 3)),
            step(f"{uid}2", uid, index=1, ids=[1, 2, 3], response=(4,)),
        ]
        own = [StepAdvantages(step_id="b1", values=pack_logprobs([7.0, 8.0]))] if uid == "b" else []
        records.append(end(uid, steps=2, reward=reward, advantages=own))
    batch = batch_of(group_of(*records, size=2), loss=LossSettings(advantage="none"))
    splitter = BatchSplitter(LossSettings(), Ranks(), torch.device("cpu"), 1_000)
    (minibatch,) = splitter.minibatches(batch)
    (pack,) = minibatch.packs
    by_sample = [pack.advantages[pack.samples == n].tolist() for n in (0, 1)]
    assert by_sample == [[-0.5, -0.5, -0.5], [7.0, 8.0, 0.5]]
