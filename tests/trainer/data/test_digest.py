"""A batch has one name, wherever it is made, and another batch has another."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pool.core.rows import Row
from tests.trainer.data.test_batch import batch_of, group
from trainer.data.batch import Batch
from trainer.data.digest import digest
from trainer.data.sample import Sample


def batch() -> Batch:
    return batch_of(group("a"), group("b", (0.0, 2.0)))


def with_sample(**fields: Any) -> Batch:
    made = batch()
    return replace(made, samples=[*made.samples[:-1], replace(made.samples[-1], **fields)])


def with_row(name: str) -> Batch:
    """The last number of one of its arrays is another one."""
    (row,) = batch().samples[-1].rows
    values: Any = np.zeros(len(row)) if name == "advantages" else getattr(row, name).copy()
    values[-1] = not values[-1] if name == "trainable" else values[-1] + 1
    return with_sample(rows=(replace(row, **{name: values}),))


def test_equal_batches_have_equal_digests() -> None:
    assert digest(batch()) == digest(batch())
    assert len(digest(batch())) == 64


@pytest.mark.parametrize("name", Row.__slots__)
def test_every_number_of_a_row_counts(name: str) -> None:
    assert digest(with_row(name)) != digest(batch())


def test_names_rewards_advantages_and_the_order_count() -> None:
    made = batch()
    (row,) = made.samples[-1].rows
    halves: tuple[Row, Row] = tuple(  # type: ignore[assignment]
        Row(*(getattr(row, name)[part] for name in Row.__slots__ if name != "advantages"))
        for part in (np.s_[:3], np.s_[3:])
    )
    others = [
        with_sample(trajectory_uid="other"),
        with_sample(reward=0.5),
        with_sample(rows=halves),
        replace(made, advantages=[*made.advantages[:-1], 0.25]),
        replace(made, samples=made.samples[::-1], advantages=made.advantages[::-1]),
        batch_of(group("b", (0.0, 2.0)), group("a")),
    ]
    assert len({digest(other) for other in [made, *others]}) == 7


def test_a_batch_whose_groups_are_all_lost_has_a_digest() -> None:
    empty: list[Sample] = []
    assert digest(replace(batch(), samples=empty, advantages=[]))
