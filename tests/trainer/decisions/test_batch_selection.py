"""Which groups make a batch, apart from any log."""

from typing import Any, cast

from schemas import DecidedGroup
from schemas.records import Verdict
from tests.pool.records import end, trajectory_of
from trainer.decisions.batch_selection import select_batch, split_by_turn
from trainer.decisions.minimum_shares import MinimumShares
from trainer.decisions.pending import ReadyGroup


class Closed:
    """As much of a group as choosing looks at."""

    def __init__(self, prompt: str, closed_at: int = 0, metadata: str = "{}") -> None:
        self.prompt_uid, self.partition, self.closed_at = prompt, 0, closed_at
        ended = end(prompt=prompt, steps=0, metadata=metadata)
        self.members = {"t": trajectory_of(ended)}


def ready(prompt: str, closed_at: int = 0, metadata: str = "{}") -> ReadyGroup:
    return ReadyGroup(cast(Any, Closed(prompt, closed_at, metadata)), cast(Any, None))


def judged(
    prompt: str, verdict: Verdict = "train", metadata: str = "{}"
) -> tuple[ReadyGroup, DecidedGroup]:
    decided = DecidedGroup(
        prompt_uid=prompt, partition=0, first_offset=0, closed_at=0, verdict=verdict
    )
    return ready(prompt, metadata=metadata), decided


def names(groups: list[Any]) -> list[str]:
    each = (item if isinstance(item, ReadyGroup) else item[0] for item in groups)
    return [one.group.prompt_uid for one in each]


def test_the_oldest_come_first_and_the_rest_waits() -> None:
    chosen = select_batch([judged("a"), judged("b"), judged("c")], 2, "refill")
    assert (names(chosen.batch), names(chosen.waiting)) == (["a", "b"], ["c"])


def test_what_became_stale_while_it_waited_is_refused_and_replaced() -> None:
    chosen = select_batch([judged("a", "stale"), judged("b"), judged("c")], 2, "refill")
    assert (names(chosen.batch), names(chosen.refused)) == (["b", "c"], ["a"])


def test_too_few_make_no_batch_but_what_is_refused_is_refused() -> None:
    chosen = select_batch([judged("a"), judged("b", "stale")], 2, "refill")
    assert (chosen.batch, names(chosen.refused), names(chosen.waiting)) == ([], ["b"], ["a"])


def test_shrink_counts_groups_without_variance() -> None:
    chosen = select_batch([judged("a", "no_variance"), judged("b"), judged("c")], 2, "shrink")
    assert (names(chosen.batch), names(chosen.refused)) == (["b"], ["a"])
    assert names(chosen.waiting) == ["c"]


def test_shrink_with_nothing_to_learn_makes_no_batch() -> None:
    chosen = select_batch([judged("a", "no_variance"), judged("b", "no_variance")], 2, "shrink")
    assert chosen.batch == []
    assert names(chosen.refused) == ["a", "b"]


def test_a_group_stands_behind_an_earlier_one_of_its_prompt() -> None:
    decided = judged("p")[1]
    behind, free = (ready("p", 20), decided), (ready("q", 20), decided)
    now, later = split_by_turn([behind, free], [ready("p", 10), ready("p", 30)])
    assert (names(now), names(later)) == (["q"], ["p"])


CODE = '{"environment": "code", "steplog_share": {"minimum": 0.5}}'


def test_places_are_kept_for_an_environment_with_a_minimum() -> None:
    plain = [judged(name) for name in "abc"]
    chosen = select_batch([*plain, judged("x", metadata=CODE)], 2, "refill", {"code": 1})
    assert (names(chosen.batch), names(chosen.waiting)) == (["a", "x"], ["b", "c"])


def test_a_batch_waits_for_a_minimum_with_its_groups_in_order() -> None:
    plain = [judged("a"), judged("b", "stale"), judged("c"), judged("d")]
    chosen = select_batch(plain, 2, "refill", {"code": 1})
    assert chosen.batch == []
    assert (names(chosen.refused), names(chosen.waiting)) == (["b"], ["a", "c", "d"])


def test_an_environment_may_have_more_than_its_minimum() -> None:
    given = [*(judged(name, metadata=CODE) for name in "xyz"), judged("a")]
    chosen = select_batch(given, 3, "refill", {"code": 1})
    assert names(chosen.batch) == ["x", "y", "z"]


def test_no_group_of_a_prompt_overtakes_an_earlier_one() -> None:
    given = [judged("a"), judged("p"), judged("p", metadata=CODE), judged("x", metadata=CODE)]
    chosen = select_batch(given, 2, "refill", {"code": 1})
    assert (names(chosen.batch), names(chosen.waiting)) == (["a", "x"], ["p", "p"])


def test_a_minimum_holds_while_its_environment_delivers() -> None:
    now = [0.0]
    minimums = MinimumShares(60.0, clock=lambda: now[0])
    assert minimums.of_batch(8) == {}
    minimums.note(cast(Any, Closed("x", metadata=CODE)))
    minimums.note(cast(Any, Closed("a")))
    assert minimums.of_batch(8) == {"code": 4}
    now[0] = 61.0
    assert minimums.of_batch(8) == {}, "it is gone, and training goes on"
