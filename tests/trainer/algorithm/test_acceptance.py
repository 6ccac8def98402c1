"""What the algorithm has to hold as a whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.algorithm.packs import gradient_of, tokens
from trainer.algorithm.aggregation import SampleCounts, token_weights
from trainer.algorithm.alarms import AlarmSettings, find_alarms
from trainer.algorithm.objective import Tokens, objective
from trainer.algorithm.settings import LossSettings

ON_POLICY = [-0.1, -1.0, -2.5, -7.0, -0.01, -3.0]


def on_policy_pack() -> Tokens:
    return tokens(
        ON_POLICY,
        ON_POLICY,
        [1.3, 1.3, -0.4, -0.4, 0.0, -2.0],
        weights=[0.1, 0.2, 0.1, 0.3, 0.1, 0.2],
        samples=[0, 0, 1, 1, 2, 3],
    )


@pytest.mark.parametrize(
    "settings",
    [
        LossSettings(),
        LossSettings(loss="ppo_clip"),
        LossSettings(loss="cispo"),
        LossSettings(loss="icepop"),
        LossSettings(loss="kpop"),
        LossSettings(loss="gspo", aggregation="rollout_mean"),
        LossSettings(loss="decoupled", ratio="decoupled"),
        LossSettings(loss="decoupled", ratio="decoupled", proximal="loglinear", rho="mask"),
        LossSettings(sequence_mask="geometric"),
        LossSettings(sequence_mask="opsm", opsm_delta=1e-4),
        LossSettings(sequence_mask="veto"),
    ],
    ids=lambda settings: f"{settings.loss}-{settings.sequence_mask}-{settings.proximal}",
)
def test_on_policy_every_loss_is_reinforce(settings: LossSettings) -> None:
    pack = on_policy_pack()
    loss, statistics = objective(settings, pack)
    reinforce = -pack.weights * pack.advantages
    assert gradient_of(loss, pack.current) == pytest.approx(reinforce.tolist(), rel=1e-6, abs=1e-9)
    metrics = statistics.metrics()
    assert metrics["ratio_mean"] == metrics["ratio_max"] == metrics["ess"] == 1.0
    assert metrics["masked_fraction"] == metrics["rejected_fraction"] == 0.0
    assert metrics["logprob_difference_age_0"] == metrics["mismatch_kl"] == 0.0


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        ("dppo_tv", "token_mean"),
        ("dppo_tv", "rollout_mean"),
        ("dppo_tv", "prompt_mean"),
        ("gspo", "rollout_mean"),
    ],
)
def test_merged_and_split_rows_give_the_same_gradient(loss: str, aggregation: str) -> None:
    settings = LossSettings.model_validate({"loss": loss, "aggregation": aggregation})
    merged = _batch(settings, [SampleCounts(0, (5,)), SampleCounts(0, (2,)), SampleCounts(1, (4,))])
    split = _batch(
        settings, [SampleCounts(0, (2, 3)), SampleCounts(0, (2,)), SampleCounts(1, (1, 3))]
    )
    first, second = objective(settings, merged)[0], objective(settings, split)[0]
    assert first.item() == pytest.approx(second.item(), rel=1e-6)
    assert gradient_of(first, merged.current) == pytest.approx(gradient_of(second, split.current))


def _batch(settings: LossSettings, counts: list[SampleCounts]) -> Tokens:
    random = np.random.default_rng(5)
    size = sum(sample.tokens for sample in counts)
    current = -random.exponential(1.0, size)
    samples = np.repeat(np.arange(len(counts)), [sample.tokens for sample in counts])
    weights = [
        np.repeat(rows, sample.rows)
        for sample, rows in zip(counts, token_weights(settings.aggregation, counts), strict=True)
    ]
    return tokens(
        current.tolist(),
        (current + random.normal(0, 1e-4, size)).tolist(),
        np.array([1.0, -0.7, 0.4])[samples].tolist(),
        weights=np.concatenate(weights).tolist(),
        samples=samples.tolist(),
        trajectories=len(counts),
    )


def test_packs_add_up_to_the_batch() -> None:
    """A trajectory over two packs: the same loss, gradient and statistics as in one."""
    settings = LossSettings()
    whole = _batch(settings, [SampleCounts(0, (3, 2)), SampleCounts(1, (4,))])
    together, expected = objective(settings, whole)
    parts = [objective(settings, _part(whole, cut)) for cut in (slice(0, 3), slice(3, 9))]
    gradient = gradient_of(parts[0][0] + parts[1][0], whole.current)
    assert gradient == pytest.approx(gradient_of(together, whole.current))
    found = (parts[0][1] + parts[1][1]).metrics()
    assert found == pytest.approx(expected.metrics())


def _part(pack: Tokens, cut: slice) -> Tokens:
    flat = ("current", "behaviour", "advantages", "weights", "samples", "ages", "entropy")
    return replace(pack, **{name: getattr(pack, name)[cut] for name in flat})


def test_a_wrong_temperature_raises_the_alarm() -> None:
    """Sampled at 0.7: the trainer's log-probs agree at 0.7 only."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(500, 50, generator=generator)
    sampler = (logits / 0.7).log_softmax(1)
    ids = torch.multinomial(sampler.exp(), 1, generator=generator)
    behaviour = sampler.gather(1, ids).squeeze(1).tolist()

    def found(temperature: float) -> list[str]:
        current = (logits / temperature).log_softmax(1).gather(1, ids).squeeze(1).tolist()
        pack = tokens(current, behaviour, [0.0] * 500)
        return find_alarms(objective(LossSettings(), pack)[1].metrics(), AlarmSettings())

    assert found(0.7) == []
    assert found(1.0)[0].startswith("mismatch: ")


def test_stale_packs_are_not_taken_for_a_mismatch() -> None:
    pack = tokens([-1.0, -1.0], [-1.0, -1.3], [1.0, 1.0], ages=[0, 4])
    metrics = objective(LossSettings(), pack)[1].metrics()
    assert metrics["logprob_difference"] == pytest.approx(0.15)
    assert metrics["logprob_difference_age_0"] == 0.0


def test_results_repeat_bit_for_bit() -> None:
    settings = LossSettings(loss="gspo", aggregation="rollout_mean", drift_tau=0.1)
    packs = [_batch(settings, [SampleCounts(0, (900,)), SampleCounts(1, (700, 80))]) for _ in "ab"]
    first, second = (objective(settings, pack) for pack in packs)
    assert first[0].item() == second[0].item()
    assert torch.equal(first[1].sums, second[1].sums)
    assert gradient_of(first[0], packs[0].current) == gradient_of(second[0], packs[1].current)


def test_the_gradient_of_dppo_is_that_of_the_ratio_form() -> None:
    """-M A r, as others write it, has the same gradient while the cap does not act."""
    pack = tokens([-1.0, -0.3, -4.0], [-1.3, -0.5, -3.0], [1.0, -1.0, 0.5])
    loss, _ = objective(LossSettings(drift_tau=0), pack)
    ratio = (pack.current - pack.behaviour).exp()
    expected = gradient_of(-ratio * pack.advantages, pack.current)
    assert gradient_of(loss, pack.current) == pytest.approx(expected, rel=1e-6)
