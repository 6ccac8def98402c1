from collections import Counter
from typing import Any

import pytest

from pool.core.group_assembler import DECIDED_MEMORY
from pool.core.ledger import Ledger, TrainedTwice
from schemas import DecidedGroup, Decision, Member, Outcome, PartitionOffsets
from schemas.records import Verdict
from tests.pool.records import RUN


def member(uid: str, verdict: Verdict = "train", *offsets: int) -> Member:
    return Member(trajectory_uid=uid, verdict=verdict, offsets=list(offsets))


def group(
    prompt: str = "p",
    *members: Member,
    first: int = 0,
    verdict: Verdict = "train",
    partition: int = 0,
) -> DecidedGroup:
    return DecidedGroup(
        prompt_uid=prompt,
        partition=partition,
        first_offset=first,
        closed_at=first + 10,
        verdict=verdict,
        members=list(members),
    )


def committed(offset: int, partition: int = 0, rebuild: int | None = None) -> PartitionOffsets:
    place = offset if rebuild is None else rebuild
    return PartitionOffsets(partition=partition, committed=offset, rebuild=place)


def decision(sequence: int, *groups: DecidedGroup, **fields: Any) -> Decision:
    return Decision(
        **{"run": RUN, "incarnation": 1, "sequence": sequence, "groups": list(groups), **fields}
    )


@pytest.mark.parametrize("verdict", ["lost", "given_up"])
def test_a_later_decision_withdraws_groups_of_a_batch(verdict: Verdict) -> None:
    made = [decision(1, group("p"), group("q", first=5), version=1), decision(2, version=None)]
    ledger = Ledger(RUN, [*made, decision(3, group("q", first=5, verdict=verdict))])
    assert ledger.withdrawn_groups() == {(0, "q", 5)}
    assert ledger.trained_after(0) == [made[0]], "the version is still made, without them"


def test_a_group_that_is_trained_twice_stops_the_process() -> None:
    ledger = Ledger(RUN, [decision(1, group("p", first=7))])
    with pytest.raises(
        TrainedTwice, match="p at offset 7 of partition 0 is trained by Decisions 1 and 2"
    ):
        ledger.add(decision(2, group("p", first=7)))


@pytest.mark.parametrize(
    "other",
    [
        group("p", first=8),  # the prompt came back in the next epoch
        group("q", first=7),
        group("p", first=7, partition=1),
        group("p", first=7, verdict="stale"),
    ],
)
def test_another_group_is_not_trained_twice(other: DecidedGroup) -> None:
    ledger = Ledger(RUN, [decision(1, group("p", first=7)), decision(2, other)])
    assert ledger.sequence == 2


def test_of_repeated_copies_of_a_decision_the_first_counts() -> None:
    first = decision(1, group("p", member("a")), version=1)
    ledger = Ledger(RUN, [first, first, decision(1, group("q", member("b")), version=9)])
    assert ledger.decision(1) == first
    assert ledger.trained_after(0) == [first]
    assert ledger.verdicts == Counter(train=1)


def test_records_of_other_runs_do_not_count() -> None:
    ledger = Ledger(RUN, [decision(4, group("p", member("a")), run="other")])
    ledger.add(Outcome(run="other", incarnation=1, sequence=4, version=1))
    assert (ledger.sequence, ledger.verdicts.total()) == (0, 0)
    assert list(ledger.decided_groups(0)) == []


def test_every_trajectory_that_a_decision_names_has_one_verdict() -> None:
    ledger = Ledger(RUN)
    ledger.add(decision(1, group("p", member("a"), member("b"), member("c", "invalid"))))
    ledger.add(
        decision(
            2,
            group("q", member("d"), member("e", "expired"), verdict="too_few"),
            group("r", member("f"), member("g"), verdict="no_variance"),
            others=[member("h", "late"), member("i", "other_channel")],
        )
    )
    assert ledger.verdicts == Counter(
        train=2, invalid=1, too_few=1, expired=1, no_variance=2, late=1, other_channel=1
    )
    assert ledger.verdicts.total() == len("abcdefghi")


def test_a_restart_trains_the_batches_after_its_checkpoint_in_order() -> None:
    batches = [decision(n, group(f"p{n}"), version=n) for n in (1, 2, 4)]
    verdicts_only = decision(3, group("q", verdict="stale"))
    ledger = Ledger(RUN, [batches[0], batches[1], verdicts_only, batches[2]])
    assert ledger.trained_after(0) == batches
    assert ledger.trained_after(1) == batches[1:]
    assert ledger.trained_after(4) == []


def test_decided_groups_of_a_partition_come_with_the_offset_committed_with_them() -> None:
    one, two = group("p", verdict="too_few"), group("q", partition=1)
    three = group("p", first=50)
    ledger = Ledger(RUN)
    ledger.add(decision(1, one, two, offsets=[committed(40), committed(70, partition=1)]))
    ledger.add(decision(2, three, offsets=[committed(90)]))
    assert list(ledger.decided_groups(0)) == [(one, 40), (three, 90)]
    assert list(ledger.decided_groups(1)) == [(two, 70)]


def test_a_group_is_decided_even_if_its_decision_did_not_move_the_partition() -> None:
    """An overdue group is closed without a new record, so nothing may have changed there."""
    first, second = group("p", member("a", "train", 3, 4)), group("q", member("b", "train", 6, 7))
    ledger = Ledger(RUN, [decision(1, first), decision(2, offsets=[committed(9)])])
    ledger.add(decision(3, second))
    assert list(ledger.decided_groups(0)) == [(first, 5), (second, 9)]


def test_trajectories_outside_of_groups_are_done_too() -> None:
    late, other = member("a", "late", 5), member("b", "other_channel", 6)
    ledger = Ledger(
        RUN, [decision(1, others=[late]), decision(2, group()), decision(3, others=[other])]
    )
    assert list(ledger.decided_others()) == [late, other]


def test_an_empty_ledger_needs_nothing() -> None:
    ledger = Ledger(RUN)
    assert (ledger.sequence, ledger.oldest_needed(), ledger.decision(1)) == (0, None, None)


def test_a_rebuild_needs_the_decisions_whose_groups_are_remembered() -> None:
    far = 5_000 + DECIDED_MEMORY
    ledger = Ledger(RUN)
    ledger.add(decision(1, offsets=[committed(1_000)]))
    ledger.add(decision(2, offsets=[committed(5_000)]))
    ledger.add(decision(3, offsets=[committed(far)]))
    assert ledger.oldest_needed() == 2
    ledger.add(decision(4, offsets=[committed(far + 1)]))
    assert ledger.oldest_needed() == 3


def test_a_rebuild_needs_the_decisions_of_every_partition() -> None:
    ledger = Ledger(RUN)
    ledger.add(decision(1, offsets=[committed(10, partition=1)]))
    ledger.add(decision(2, offsets=[committed(2 * DECIDED_MEMORY)]))
    assert ledger.oldest_needed() == 1


def test_a_rebuild_needs_the_decisions_on_records_that_it_reads_again() -> None:
    ledger = Ledger(RUN)
    ledger.add(decision(1, offsets=[committed(10)]))
    ledger.add(decision(2, offsets=[committed(3 * DECIDED_MEMORY, rebuild=10)]))
    assert ledger.oldest_needed() == 1
