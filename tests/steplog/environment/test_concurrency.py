from itertools import pairwise

from steplog.environment.running.concurrency import Concurrency


def rounds(
    concurrency: Concurrency, count: int, seconds_per_token: float, had_to_wait: bool = False
) -> list[int]:
    """The limit after each round."""
    limits = []
    for _ in range(count):
        for _ in range(concurrency.limit):
            concurrency.record_group(seconds_per_token, had_to_wait)
        limits.append(concurrency.limit)
    return limits


def test_it_begins_with_few_and_doubles_up_to_the_most() -> None:
    limits = rounds(Concurrency(50), 6, seconds_per_token=0.01)
    assert limits[0] == 4 and limits[-1] == 50
    assert all(after <= 2 * before + 1 for before, after in pairwise(limits))


def test_engines_that_get_slower_let_fewer_begin_and_then_growth_is_slow() -> None:
    concurrency = Concurrency(100)
    full, *_, less = [
        *rounds(concurrency, 5, seconds_per_token=0.01)[-1:],
        *rounds(concurrency, 3, seconds_per_token=0.03),
    ]
    assert less < full
    after = rounds(concurrency, 3, seconds_per_token=0.01)
    assert after == [less + 1, less + 2, less + 3]


def test_it_finds_the_number_at_which_engines_are_full() -> None:
    """An engine that has 12 at once at full speed, and shares it among more."""
    concurrency = Concurrency(200)
    limits = []
    for _ in range(60):
        limits += rounds(concurrency, 1, seconds_per_token=0.01 * max(1.0, concurrency.limit / 12))
    assert all(15 <= limit <= 30 for limit in limits[20:])


def test_waiting_for_the_trainer_neither_adds_groups_nor_takes_any() -> None:
    concurrency = Concurrency(100)
    before = rounds(concurrency, 3, seconds_per_token=0.01)[-1]
    assert rounds(concurrency, 4, seconds_per_token=0.01, had_to_wait=True) == [before] * 4


def test_one_group_always_runs() -> None:
    concurrency = Concurrency(1)
    rounds(concurrency, 1, seconds_per_token=0.01)
    assert rounds(concurrency, 5, seconds_per_token=1.0) == [1] * 5


def test_groups_that_say_nothing_are_no_reason_to_slow_down() -> None:
    concurrency = Concurrency(8)
    for _ in range(30):
        concurrency.record_group(None, had_to_wait=False)
    assert concurrency.limit == 8
