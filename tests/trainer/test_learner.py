from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pool.core.rows import Row
from servicekit.errors import Fatal
from tests.trainer.model import small
from tests.trainer.model.test_packed import models, padded_logprobs
from tests.trainer.saved import save
from trainer.algorithm.objective import Tokens, objective
from trainer.algorithm.settings import LossSettings
from trainer.checkpoints.folder import Checkpoints
from trainer.checkpoints.saved_state import SavedState
from trainer.data.batch import Batch
from trainer.data.sample import Sample
from trainer.learner import Learner
from trainer.learner_state import restore_state, state_tensors
from trainer.model.minibatches import BatchSplitter
from trainer.model.settings import ExecutionSettings, LearnerSettings

CPU = torch.device("cpu")
EXECUTION = ExecutionSettings.model_fields.keys()
MODELS: dict[str, dict[str, Any]] = models()


def learner(
    causal: Any = None, loss: LossSettings | None = None, reference: Any = None, **settings: Any
) -> Learner:
    """Settings of the learner and of the execution, in one."""
    given = {"learning_rate": 1e-3, "tokens_per_pack": 64} | settings
    execution = {name: given.pop(name) for name in EXECUTION & given.keys()}
    return Learner(
        small.model() if causal is None else causal,
        LearnerSettings(**given),
        loss or LossSettings(),
        ExecutionSettings(**execution),
        reference=reference,
        device=CPU,
    )


def gradient_of(made: Learner, batch: Batch) -> torch.Tensor:
    """What the batch does before the optimiser; the loss is in it as its last number."""
    (minibatch,) = made.minibatches(batch)
    total = torch.zeros(1)
    for part in minibatch.packs:
        loss, _ = objective(made.loss, made._tokens(part, len(batch.samples)))
        loss.backward()
        total += loss.detach()
    gradients = [weight.grad.flatten() for weight in made.trained.parameters.values()]
    return torch.cat([*gradients, total])


def weights_of(made: Learner) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in made.trained.parameters.values()])


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= 1e-5 * other.norm())


def halves(row: Row) -> tuple[Row, Row]:
    """A row as the two Steps of which it was merged."""
    middle = len(row) // 2 + 2
    early = np.arange(len(row)) < middle
    assert row.advantages is None
    arrays = [name for name in row.__dataclass_fields__ if name != "advantages"]
    first = Row(*(getattr(row, name)[:middle] for name in arrays))
    return first, replace(row, trainable=row.trainable & ~early)


def split(batch: Batch) -> Batch:
    return replace(
        batch,
        samples=[
            replace(sample, rows=tuple(half for row in sample.rows for half in halves(row)))
            for sample in batch.samples
        ],
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "rollout_mean", "prompt_mean"])
@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_merged_and_split_rows_have_the_same_gradient(kind: str, aggregation: Any) -> None:
    loss = LossSettings(aggregation=aggregation)
    batch = small.batch(temperature=0.7)
    whole = gradient_of(learner(small.model(kind), loss), batch)
    assert close(gradient_of(learner(small.model(kind), loss), split(batch)), whole)


@pytest.mark.parametrize("budget", [1, 50, 100_000])
def test_the_gradient_does_not_depend_on_the_packs(budget: int) -> None:
    batch = small.batch()
    expected = gradient_of(learner(), batch)
    assert close(gradient_of(learner(tokens_per_pack=budget), batch), expected)


def test_packed_and_padded_rows_have_the_same_gradient() -> None:
    batch, plain, loss = small.batch(temperature=0.7), small.model(), LossSettings()
    rows = [(sample, row) for sample, each in enumerate(batch.samples) for row in each.rows]
    counts = torch.tensor([int(row.trainable.sum()) for _, row in rows])
    samples = torch.tensor([sample for sample, _ in rows]).repeat_interleave(counts)
    current = padded_logprobs(plain, [row for _, row in rows])
    tokens = Tokens(
        current=current,
        behaviour=torch.cat([torch.from_numpy(row.behaviour[row.trainable]) for _, row in rows]),
        advantages=torch.tensor(batch.advantages)[samples],
        weights=torch.full((len(current),), 1 / len(current)),
        samples=samples,
        ages=torch.zeros(len(current), dtype=torch.int64),
        entropy=torch.zeros(len(current)),
    )
    value, _ = objective(loss, tokens)
    value.backward()
    expected = [weight.grad.flatten() for weight in plain.parameters()]
    found = gradient_of(learner(), batch)
    assert close(found, torch.cat([*expected, value.detach()[None]]))


def without_trees(made: Learner) -> Learner:
    made.model.mode = replace(made.model.mode, trees=None)
    return made


@pytest.mark.parametrize("budget", [50, 100_000])
@pytest.mark.parametrize(
    "loss",
    [
        {"aggregation": "seq_mean_token_mean", "kl_beta": 0.1, "entropy_bonus": 0.01},
        {"loss": "gspo", "aggregation": "rollout_mean"},
    ],
)
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3Moe"])
def test_trees_and_rows_have_the_same_gradient(kind: str, loss: Any, budget: int) -> None:
    """Also where branches share sampled ids, which each of them trains."""
    batch = small.branched_batch()
    by_trees, by_rows = (
        learner(
            small.model(kind, **MODELS[kind]),
            LossSettings(**loss),
            small.model(kind, **MODELS[kind]),
            tokens_per_pack=budget,
        )
        for _ in range(2)
    )
    assert by_trees.model.mode.trees == "rows"
    found, expected = gradient_of(by_trees, batch), gradient_of(without_trees(by_rows), batch)
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


def test_trees_and_rows_have_the_same_log_probs() -> None:
    made, batch = learner(tokens_per_pack=100_000), small.branched_batch()
    whole = without_trees(learner(tokens_per_pack=100_000))
    (trees,), (rows,) = (each.minibatches(batch)[0].packs for each in (made, whole))
    assert len(trees.pack.ids) < 0.6 * len(rows.pack.ids)
    found, expected = (
        sorted(
            zip(
                pack.samples.tolist(),
                pack.pack.targets.tolist(),
                model(pack.pack)[0].tolist(),
                strict=True,
            )
        )
        for pack, model in ((trees, made.model), (rows, whole.model))
    )
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], abs=1e-5)


def test_a_batch_that_shares_ids_says_what_it_saves() -> None:
    batch = small.branched_batch()
    metrics = learner(tokens_per_pack=100_000).step(batch)
    assert metrics["tree_tokens"] < 0.6 * metrics["row_tokens"]
    assert metrics["balance"] == 1
    assert without_trees(learner()).step(batch)["tree_tokens"] == metrics["row_tokens"]


def test_recomputed_layers_change_nothing() -> None:
    batch = small.batch()
    expected = gradient_of(learner(), batch)
    assert close(gradient_of(learner(gradient_checkpointing=True), batch), expected)


def test_a_model_that_is_run_row_by_row_trains_too() -> None:
    made = learner(small.mamba())
    metrics = made.step(small.batch())
    assert metrics["packs"] == metrics["rows"]
    assert metrics["grad_norm"] > 0


def test_a_whole_trajectory_lies_in_one_pack_where_the_loss_looks_at_it() -> None:
    loss = LossSettings(loss="gspo", aggregation="rollout_mean")
    (minibatch,) = learner(loss=loss, tokens_per_pack=1).minibatches(small.batch())
    assert len(minibatch.packs) == 8
    assert all(len(part.samples.unique()) == 1 for part in minibatch.packs)


def test_two_runs_from_the_same_state_give_the_same_bits() -> None:
    runs = [learner(), learner()]
    for made in runs:
        for seed in range(3):
            made.step(small.batch(seed=seed))
            made.step(small.branched_batch(seed))
    assert torch.equal(weights_of(runs[0]), weights_of(runs[1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    one = learner(dtype=dtype, warmup=4)
    one.step(small.batch(seed=1))
    saved = save(Checkpoints(tmp_path, "run", keep=1), 1, one)
    other = learner(dtype=dtype, warmup=4)
    restore_state(other, SavedState(saved))
    assert torch.equal(weights_of(other), weights_of(one))
    told = [made.step(small.batch(seed=2)) for made in (one, other)]
    assert torch.equal(weights_of(other), weights_of(one))
    for metrics in told:
        del metrics["tokens_per_second"]
    assert told[0] == told[1]


def test_a_checkpoint_of_earlier_releases_is_restored(tmp_path: Path) -> None:
    """Their checkpoints were one file with whole tensors."""
    one = learner()
    one.step(small.batch(seed=1))
    save_file(state_tensors(one), tmp_path / "state.safetensors")
    other = learner()
    restore_state(other, SavedState(tmp_path))
    assert torch.equal(weights_of(other), weights_of(one))
    for made in (one, other):
        made.step(small.batch(seed=2))
    assert torch.equal(weights_of(other), weights_of(one))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saved = save(Checkpoints(tmp_path, "run", keep=1), 1, learner())
    larger = learner(small.model(hidden_size=48))
    with pytest.raises(Fatal, match=r"does not fit the model: .* \(96, 32\) there and \(96, 48\)"):
        restore_state(larger, SavedState(saved))


def test_small_steps_are_not_lost_in_bf16() -> None:
    made = learner(dtype="bfloat16", learning_rate=1e-6)
    before = weights_of(made).clone()
    for _ in range(3):
        made.step(small.batch())
    moved = (weights_of(made) - before).abs()
    assert 1e-6 < float(moved.max()) < 1e-5


def test_every_sample_is_trained_once_in_several_optimiser_steps() -> None:
    loss = LossSettings(loss="decoupled", ratio="decoupled", optimiser_steps=3)
    made, batch = learner(loss=loss), small.batch()
    parts = made.minibatches(batch)
    seen = [sorted({int(s) for part in one.packs for s in part.samples}) for one in parts]
    assert sorted(sample for one in seen for sample in one) == list(range(8))
    metrics = made.step(batch)
    assert made.steps == 3
    assert metrics["trajectories"] == 8


def test_the_proximal_policy_is_the_one_before_the_first_step() -> None:
    loss = LossSettings(loss="decoupled", ratio="decoupled", optimiser_steps=2)
    made, batch = learner(loss=loss, learning_rate=1e-2), small.batch()
    asked: list[Tokens] = []
    tokens = made._tokens

    def kept(pack: Any, trajectories: int) -> Tokens:
        asked.append(tokens(pack, trajectories))
        return asked[-1]

    made._tokens = kept  # type: ignore[method-assign]
    made.step(batch)
    first, last = asked[0], asked[-1]
    assert first.proximal is not None and last.proximal is not None
    assert torch.equal(first.proximal, first.current.detach())
    assert not torch.allclose(last.proximal, last.current.detach())


def test_the_reference_stays_where_it_was() -> None:
    loss = LossSettings(kl_beta=0.1)
    made = learner(loss=loss, reference=small.model(), learning_rate=1e-2)
    assert made.step(small.batch())["kl"] == 0
    assert made.step(small.batch())["kl"] > 0


def test_ages_are_counted_from_the_version_that_is_trained() -> None:
    metrics = learner().step(replace(small.batch(), version=6))
    assert metrics["age_mean"] == 2


def test_at_the_right_temperature_the_log_probs_are_those_of_sampling() -> None:
    batch = small.batch(temperature=0.7)
    with torch.no_grad():
        rows = [row for sample in batch.samples for row in sample.rows]
        told = padded_logprobs(small.model(), rows).numpy()
    # As if an engine had sampled with these weights.
    places = iter(
        np.split(told, np.cumsum([int(r.trainable.sum()) for s in batch.samples for r in s.rows]))
    )
    samples = [
        replace(sample, rows=tuple(_recorded(row, next(places)) for row in sample.rows))
        for sample in batch.samples
    ]
    recorded = replace(batch, samples=samples)
    assert learner().step(recorded)["logprob_difference_age_0"] < 1e-5
    plain = [
        replace(
            s, rows=tuple(replace(r, temperatures=np.ones_like(r.temperatures)) for r in s.rows)
        )
        for s in samples
    ]
    assert learner().step(replace(recorded, samples=plain))["logprob_difference_age_0"] > 0.05


def _recorded(row: Row, logprobs: Any) -> Row:
    behaviour = row.behaviour.copy()
    behaviour[row.trainable] = logprobs
    return replace(row, behaviour=behaviour)


def test_a_batch_without_a_trainable_token_changes_nothing() -> None:
    row = small.row(9, 1)
    masked = replace(row, trainable=np.zeros_like(row.trainable))
    batch = replace(
        small.batch(1), samples=[Sample("t", 0, 0.0, True, (masked,))], advantages=[1.0]
    )
    made = learner()
    before = weights_of(made).clone()
    assert made.step(batch)["tokens"] == 0
    assert torch.equal(weights_of(made), before)


def test_gradients_are_clipped() -> None:
    made = learner(grad_clip=1e-3)
    (minibatch,) = made.minibatches(small.batch())
    for part in minibatch.packs:
        objective(made.loss, made._tokens(part, 8))[0].backward()
    assert float(made._clip()) > 1e-3
    norms = [weight.grad.norm() for weight in made.trained.parameters.values()]
    assert float(torch.stack(norms).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_the_learning_rate_warms_up_and_falls() -> None:
    rates = [LearnerSettings(learning_rate=1.0, warmup=2).rate_at(step) for step in range(4)]
    assert rates == [0.5, 1.0, 1.0, 1.0]
    linear = LearnerSettings(learning_rate=1.0, schedule="linear", total_steps=4)
    assert [linear.rate_at(step) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = LearnerSettings(learning_rate=1.0, schedule="cosine", total_steps=4)
    assert cosine.rate_at(2) == pytest.approx(0.5)


def test_a_schedule_that_falls_needs_an_end() -> None:
    with pytest.raises(ValueError, match="needs total_steps"):
        LearnerSettings(schedule="cosine")


def test_matrices_decay_and_norms_do_not() -> None:
    groups = learner(weight_decay=0.1).optimiser.param_groups
    assert [(group["weight_decay"], group["params"][0].ndim) for group in groups] == [
        (0.1, 2),
        (0, 1),
    ]


def test_a_decision_does_not_say_how_large_packs_are() -> None:
    old = {"learning_rate": 1e-4, "tokens_per_pack": 10**6}  # as earlier releases recorded it
    made = learner(tokens_per_pack=64)
    made.adopt(LearnerSettings.from_record(old), LossSettings())
    assert made.settings.learning_rate == 1e-4
    (minibatch,) = made.minibatches(small.batch())
    assert len(minibatch.packs) > 2


def test_logprobs_are_those_of_the_temperature() -> None:
    made = learner()
    ids = small.row(12, 1).ids
    with torch.no_grad():
        logits = small.model()(torch.tensor(ids[None].astype(np.int64))).logits[0, :-1]
    expected = torch.log_softmax(logits / 1.5, -1)[range(11), ids[1:]]
    np.testing.assert_allclose(made.logprobs(ids, 1.5)[1:], expected, atol=1e-5)


def test_a_batch_that_was_packed_ahead_is_packed_again_only_for_other_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, ahead, batch = learner(), learner(), small.batch()
    ahead.packed = ahead.pack(batch, ahead.loss)
    plain.step(batch)
    with monkeypatch.context() as without_splitter:
        without_splitter.setattr(BatchSplitter, "minibatches", None)
        ahead.step(batch)
        packs = ahead.minibatches(batch)[0].plan.packs
    assert torch.equal(weights_of(ahead), weights_of(plain))
    ahead.execution = ahead.execution.model_copy(update={"tokens_per_pack": 16})
    assert ahead.minibatches(batch)[0].plan.packs > packs
