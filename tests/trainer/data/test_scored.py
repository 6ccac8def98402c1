"""Groups from the Atropos API are trained like any other, where that is asked for."""

from typing import Any

import numpy as np
import pytest
import torch

from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group, GroupRules
from pool.core.ledger import Ledger
from pool.core.marks import PolicyMarks
from pool.core.progress import Received
from pool.core.rows import build_rows
from pool.core.trajectories import StrayRecord
from schemas import Decision, PolicyVersion, ScoredGroup
from schemas.packing import pack_ids
from tests.pool.records import RUN
from tests.trainer.data.test_batch import batch_of
from trainer.algorithm.settings import LossSettings
from trainer.decisions.judge import Judge
from trainer.decisions.settings import DecisionSettings
from trainer.model.minibatches import BatchSplitter
from trainer.model.sharding import Ranks

TOKENS = (11, 12, 13, 14, 15, 16)
MASK = (-100, 12, 13, -100, 15, -100)
LOGPROBS = (1.0, -0.25, -0.5, 1.0, -0.75, 1.0)
UNLIKELY = (1.0, -0.25, -3e38, 1.0, -0.75, 1.0)


def floats(*sequences: tuple[float, ...]) -> list[bytes]:
    return [np.array(sequence, "<f8").tobytes() for sequence in sequences]


def posted(**fields: Any) -> ScoredGroup:
    """Two sequences, each with two turns of the model."""
    given: dict[str, Any] = {
        "group_uid": "g",
        "prompt_uid": "p",
        "tokens": [pack_ids(TOKENS)] * 2,
        "masks": [pack_ids(MASK)] * 2,
        "scores": [0.0, 1.0],
        "inference_logprobs": floats(LOGPROBS, LOGPROBS),
        **fields,
    }
    return ScoredGroup(run=RUN, sequence=1, **given)


def group_of(record: ScoredGroup, offset: int = 7) -> Group:
    item = GroupAssembler().feed(Received(record, 0, offset))
    assert isinstance(item, Group)
    return item


def marks(*rewarded: int) -> PolicyMarks:
    """Version n was opened when the rewards ended at the n-th offset."""
    return PolicyMarks(
        RUN,
        (
            PolicyVersion(
                run=RUN,
                incarnation=1,
                version=version,
                phase="opened",
                steps_marks=[0],
                rewarded_marks=[offset],
            )
            for version, offset in enumerate(rewarded)
        ),
    )


def test_a_group_for_trainers_that_pull_is_passed_over() -> None:
    item = GroupAssembler().feed(Received(posted(channel="atropos"), 0, 7))
    assert isinstance(item, StrayRecord) and item.verdict == "other_channel"


def judge(known: PolicyMarks, **fields: Any) -> Judge:
    return Judge(DecisionSettings(**fields), known, LossSettings())


def test_a_posted_sequence_is_one_row_with_its_own_mask_and_logprobs() -> None:
    for member in group_of(posted()).members.values():
        (row,) = build_rows(member)
        assert row.ids.tolist() == list(TOKENS[:5])  # nothing behind the last sampled id is read
        assert row.trainable.tolist() == [False, True, True, False, True]
        assert row.behaviour.tolist() == [0, -0.25, -0.5, 0, -0.75]


def test_it_ages_by_its_own_offset() -> None:
    known = marks(0, 5, 8, 9)
    group = group_of(posted(), offset=7)
    assert {known.age(member, 3) for member in group.members.values()} == {(2, 0)}
    assert judge(known, max_age=2).judge(group, 3).verdict == "train"
    decided = judge(known, max_age=1).judge(group, 3)
    assert {member.verdict for member in decided.members} == {"stale"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"inference_logprobs": None}, "came without inference_logprobs"),
        ({"inference_logprobs": []}, "came without inference_logprobs"),
        ({"masks": [pack_ids(MASK[:2])] * 2}, r"mask and its tokens differ in length \(2 and 6\)"),
        (
            {"advantages": floats((1.0,), (1.0,))},
            r"advantages and its tokens differ .* \(1 and 6\)",
        ),
        ({"overrides": '[{"sft": true}, {"sft": true}]'}, "supervised fine-tuning"),
        ({"generation_params": '{"top_p": 0.9}'}, "the distribution was changed by top_p"),
        ({"group_overrides": '{"repetition_penalty": 1.2}'}, "changed by repetition_penalty"),
        ({"generation_params": '{"temperature": "hot"}'}, "'hot', which is not a positive number"),
        (
            {"inference_logprobs": floats(UNLIKELY, UNLIKELY)},
            "logprob of -3e.38, with which no",
        ),
        ({"inference_logprobs": floats(LOGPROBS[::-1], LOGPROBS)}, "logprob of 1, which no prob"),
        ({"scores": [float("nan"), 1.0]}, "its reward, .* is nan"),
    ],
)
def test_what_cannot_be_trained_says_why(fields: dict[str, Any], reason: str) -> None:
    decided = judge(marks(0)).judge(group_of(posted(**fields)), 0)
    assert decided.verdict == "too_few"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(decided.members[0].reason)


def test_temperatures_come_from_the_nearest_word() -> None:
    group = group_of(
        posted(
            overrides='[{"temperature": 0.5}, {}]',
            generation_params='{"temperature": 0.7}',
            group_overrides='{"temperature": 0.9}',
        )
    )
    found = [build_rows(member)[0].temperatures[1] for member in group.members.values()]
    assert np.allclose(found, [0.5, 0.7])


def test_the_environments_own_advantages_hold_token_by_token() -> None:
    own = (9.0, 1.0, 2.0, 9.0, 3.0, 9.0)
    group = group_of(
        posted(
            scores=[1.0, 1.0],
            advantages=floats(own, own),
            overrides='[{}, {"set_advantage_to_zero": true}]',
        )
    )
    assert judge(marks(0)).judge(group, 0).verdict == "train"  # though all scores are equal
    cutter = BatchSplitter(LossSettings(), Ranks(), torch.device("cpu"), 1_000)
    (minibatch,) = cutter.minibatches(batch_of(group))
    (part,) = minibatch.packs
    by_sample = [part.advantages[part.samples == n].tolist() for n in (0, 1)]
    assert by_sample == [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]


def test_a_decided_group_is_not_handed_out_again() -> None:
    group = group_of(posted())
    decided = judge(marks(0)).judge(group, 0)
    ledger = Ledger(RUN, [Decision(run=RUN, incarnation=1, sequence=1, groups=[decided])])
    again = GroupAssembler(GroupRules(), ledger.decided_groups(0), ledger.decided_others())
    assert again.feed(Received(posted(), 0, 7)) is None
