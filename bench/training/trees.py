"""Trees against rows: the same groups, trained with shared ids computed once and with whole rows."""

from dataclasses import replace
from typing import Any

import torch

from bench.training.rows import batch_of, batch_of_groups, lengths
from bench.training.speed import SpeedTable
from trainer.algorithm.objective import objective
from trainer.learner import Learner
from trainer.model.packed import ExecutionMode

GROUPS, SIZE, PROMPT, ANSWER = 16, 8, 2048, 512
UNSHARED_ROWS, UNSHARED_MEAN, UNSHARED_MOST = 256, 600, 3072


def compare_speed(learner: Learner, table: SpeedTable, scale: int = 1) -> None:
    """Prints the speed of both, where groups share their prompt and where nothing is shared. Lengths
    and numbers are divided by `scale`."""
    vocabulary, groups = learner.model.causal.config.vocab_size, max(GROUPS // scale, 2)
    shared = batch_of_groups(groups, SIZE, PROMPT // scale, ANSWER // scale, vocabulary)
    sizes = lengths(UNSHARED_ROWS // scale, UNSHARED_MEAN // scale, UNSHARED_MOST // scale)
    unshared = batch_of(sizes, vocabulary)
    names = {
        f"{groups} groups of {SIZE}, {PROMPT // scale} + {ANSWER // scale}": shared,
        "nothing shared": unshared,
    }
    for name, batch in names.items():
        by_trees = _measure(learner, table, f"{name}: trees", batch, learner.model.mode)
        by_rows = _measure(
            learner, table, f"{name}: rows", batch, replace(learner.model.mode, trees=None)
        )
        print(f"{name}: trees are {by_trees / by_rows:.2f} times as fast as rows\n", flush=True)


def _measure(
    learner: Learner, table: SpeedTable, name: str, batch: Any, mode: ExecutionMode
) -> float:
    kept = learner.model.mode
    learner.model.mode = mode
    try:
        (minibatch,) = learner.minibatches(batch)
        trees = [tree for round in minibatch.plan.rounds for pack in round for tree in pack]
        computed = sum(tree.tokens for tree in trees), sum(tree.cost(0) for tree in trees)
        return table.measure(name, batch, lambda: learner.step(batch), computed)
    finally:
        learner.model.mode = kept


def compare_results(learner: Learner) -> None:
    """Prints how far log-probs and gradients of trees are from those of rows, and these from those of
    rows that are run one by one with the model's own attention."""
    vocabulary, best = learner.model.causal.config.vocab_size, learner.model.mode
    batch = batch_of_groups(2, 4, 300, 100, vocabulary)
    modes = {
        "trees": best,
        "rows": replace(best, trees=None),
        "row by row": ExecutionMode("single", "full"),
    }
    results = {name: _logprobs_and_gradient(learner, batch, mode) for name, mode in modes.items()}
    for name, other in (("trees", "rows"), ("rows", "row by row")):
        (logprobs, gradient), (other_logprobs, other_gradient) = results[name], results[other]
        difference = float((logprobs - other_logprobs).abs().max())
        distance = float((gradient - other_gradient).norm() / other_gradient.norm())
        print(
            f"{name} and {other} ({modes[name].trees or modes[name].kernel}, {learner.dtype}): "
            f"log-probs differ by at most {difference:.1e}, gradients by {distance:.1e}",
            flush=True,
        )


def _logprobs_and_gradient(learner: Learner, batch: Any, mode: ExecutionMode) -> tuple[Any, Any]:
    """Log-probs in the order of samples, and the gradient of the loss."""
    kept = learner.model.mode
    learner.model.mode = mode
    try:
        logprobs, samples = [], []
        (minibatch,) = learner.minibatches(batch)
        for part in minibatch.packs:
            tokens = learner._tokens(part, len(batch.samples))
            objective(learner.loss, tokens)[0].backward()
            logprobs.append(tokens.current.detach())
            samples.append(part.samples)
        order = torch.cat(samples).argsort(stable=True)
        weights = learner.trained.parameters.values()
        gradient = torch.cat([weight.grad.flatten().clone() for weight in weights])
        return torch.cat(logprobs)[order], gradient
    finally:
        learner.optimiser.zero_grad(set_to_none=True)
        learner.model.mode = kept
