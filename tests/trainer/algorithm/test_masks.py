from math import log

import torch

from tests.trainer.algorithm.packs import tensor
from trainer.algorithm import masks


def test_geometric_keeps_what_lies_within_bounds() -> None:
    means = tensor([log(0.98), log(0.995), 0.0, log(1.005), log(1.02)])
    kept = masks.geometric(means, sequence_lo=0.99, sequence_hi=1.01)
    assert kept.tolist() == [False, True, True, True, False]


def test_geometric_may_have_no_lower_bound() -> None:
    assert masks.geometric(tensor([-19.0]), sequence_lo=0.0, sequence_hi=1.01).tolist() == [True]


def test_opsm_drops_bad_trajectories_that_have_become_unlikely() -> None:
    means, advantages = tensor([-0.2, -0.2, -0.05, 0.2]), tensor([-1.0, 1.0, -1.0, -1.0])
    assert masks.opsm(means, advantages, opsm_delta=0.1).tolist() == [False, True, True, True]


def test_veto_needs_a_single_token() -> None:
    log_ratio = tensor([0.0, log(101.0), 0.0, 0.0, log(0.9e-4), 0.0])
    samples = torch.tensor([0, 0, 1, 1, 2, 4])
    kept = masks.veto(log_ratio, samples, 5, sequence_lo=1e-4, sequence_hi=100.0)
    assert kept.tolist() == [False, True, False, True, True]
