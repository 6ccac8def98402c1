"""The same loss and gradient as TRL's own code, on the same rollouts."""

from typing import Any

import numpy as np
import pytest
import torch

from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.aggregation import SampleCounts, token_weights
from trainer.algorithm.objective import Tokens, objective
from trainer.algorithm.settings import LossSettings

# TRL and what it imports warn about their own futures.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GROUP_STD = {"advantage": "group_std"}
CLASSIC = GROUP_STD | {"loss": "ppo_clip"}
GSPO = GROUP_STD | {"loss": "gspo", "aggregation": "rollout_mean"}
CISPO = GROUP_STD | {"loss": "cispo"}
DECOUPLED = GROUP_STD | {"loss": "decoupled", "ratio": "decoupled", "optimiser_steps": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bnpo": (CLASSIC, {"loss_type": "bnpo"}),
    "dapo": (CLASSIC, {"loss_type": "dapo"}),
    "grpo": (CLASSIC | {"aggregation": "rollout_mean"}, {"loss_type": "grpo"}),
    "grpo per row": (CLASSIC | {"aggregation": "seq_mean_token_mean"}, {"loss_type": "grpo"}),
    "dr_grpo": (
        CLASSIC | {"advantage": "none", "aggregation": "seq_sum_norm", "l_const": 12},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "narrow clip": (
        CLASSIC | {"e_lo": 0.05, "e_hi": 0.1, "dual_clip": 1.2},
        {"loss_type": "bnpo", "epsilon": (0.05, 0.1), "delta": 1.2},
    ),
    "without dual clip": (CLASSIC | {"dual_clip": 1e9}, {"loss_type": "bnpo", "delta": None}),
    # TRL's bound of cispo is the ratio itself.
    "cispo": (CISPO, {"loss_type": "cispo", "epsilon": (1.0, 5.0)}),
    "cispo narrow": (CISPO | {"e_hi": 0.1}, {"loss_type": "cispo", "epsilon": (1.0, 1.1)}),
    "gspo": (
        GSPO,
        {"loss_type": "grpo", "level": "sequence", "epsilon": (3e-4, 4e-4), "delta": None},
    ),
    "gspo wide": (
        GSPO | {"e_lo": 0.1, "e_hi": 0.1},
        {"loss_type": "grpo", "level": "sequence", "epsilon": (0.1, 0.1), "delta": None},
    ),
    "kl": (CLASSIC | {"kl_beta": 0.04}, {"loss_type": "bnpo", "beta": 0.04}),
    "kl off policy": (
        CLASSIC | {"kl_beta": 0.04, "kl_off_policy": True},
        {"loss_type": "bnpo", "beta": 0.04, "off_policy_kl": True},
    ),
    "opsm": (
        CLASSIC | {"sequence_mask": "opsm", "opsm_delta": 0.02, "kl_beta": 0.04},
        {"loss_type": "bnpo", "opsm": 0.02, "beta": 0.04},
    ),
    "decoupled": (DECOUPLED, {"loss_type": "bnpo", "correction": "token_truncate"}),
    "decoupled mask": (
        DECOUPLED | {"rho": "mask", "rho_lo": 0.8, "rho_hi": 1.3},
        {"loss_type": "bnpo", "correction": "token_mask", "clip": (0.8, 1.3)},
    ),
}


def ours(settings: LossSettings, played: Any) -> tuple[Any, list[float]]:
    counts = [SampleCounts(i // 4, (length,)) for i, length in enumerate(played.lengths)]
    rewards = np.array(played.rewards, np.float64).reshape(2, 4)
    each = np.concatenate(compute_advantages(list(rewards), settings.advantage))
    weights = np.concatenate(token_weights(settings.aggregation, counts, l_const=settings.l_const))
    rows, _ = torch.nonzero(played.mask, as_tuple=True)
    pack = Tokens(
        current=played.current[played.mask],
        behaviour=played.sampling[played.mask],
        advantages=torch.tensor(each, dtype=torch.float32)[rows],
        weights=torch.tensor(weights, dtype=torch.float32)[rows],
        samples=rows,
        ages=torch.zeros_like(rows),
        entropy=torch.zeros(len(rows)),
        proximal=played.proximal[played.mask],
        reference=played.reference[played.mask],
    )
    return objective(settings, pack)[0], each.tolist()


@pytest.mark.parametrize("drift", [1e-4, 0.1, 0.8])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(case: str, drift: float) -> None:
    pytest.importorskip("trl")
    from tests.trainer.algorithm.trl_peer import Peer, rollouts

    chosen, peers = CASES[case]
    played = rollouts(7, drift)
    theirs, their_advantages = Peer(played, **peers).loss()
    loss, our_advantages = ours(LossSettings.model_validate(chosen), played)

    # TRL adds 1e-4 to a standard deviation, verl and we 1e-6.
    assert our_advantages == pytest.approx(their_advantages, rel=1e-3, abs=1e-6)
    assert loss.item() == pytest.approx(theirs.item(), rel=2e-3, abs=1e-5)
    (gradient,) = torch.autograd.grad(loss, played.current)
    (expected,) = torch.autograd.grad(theirs, played.current)
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)
