from itertools import pairwise

from steplog.environment.concurrency import Concurrency


def rounds(concurrency: Concurrency, count: int, pace: float, refused: bool = False) -> list[int]:
    """The limit after each of so many rounds."""
    limits = []
    for _ in range(count):
        for _ in range(concurrency.limit):
            concurrency.ended(pace, refused)
        limits.append(concurrency.limit)
    return limits


def test_it_begins_with_few_and_doubles_up_to_the_most() -> None:
    limits = rounds(Concurrency(50), 6, pace=0.01)
    assert limits[0] == 4 and limits[-1] == 50
    assert all(after <= 2 * before + 1 for before, after in pairwise(limits))


def test_engines_that_get_slower_let_fewer_begin_and_then_growth_is_slow() -> None:
    concurrency = Concurrency(100)
    full, *_, less = [*rounds(concurrency, 5, pace=0.01)[-1:], *rounds(concurrency, 3, pace=0.03)]
    assert less < full
    after = rounds(concurrency, 3, pace=0.01)
    assert after == [less + 1, less + 2, less + 3]


def test_it_finds_the_number_at_which_engines_are_full() -> None:
    """An engine that has 12 at once at full speed, and shares it among more."""
    concurrency = Concurrency(200)
    limits = []
    for _ in range(60):
        limits += rounds(concurrency, 1, pace=0.01 * max(1.0, concurrency.limit / 12))
    assert all(15 <= limit <= 30 for limit in limits[20:])


def test_waiting_for_the_trainer_neither_adds_groups_nor_takes_any() -> None:
    concurrency = Concurrency(100)
    before = rounds(concurrency, 3, pace=0.01)[-1]
    assert rounds(concurrency, 4, pace=0.01, refused=True) == [before] * 4


def test_one_group_always_runs() -> None:
    concurrency = Concurrency(1)
    rounds(concurrency, 1, pace=0.01)
    assert rounds(concurrency, 5, pace=1.0) == [1] * 5


def test_groups_that_say_nothing_are_no_reason_to_slow_down() -> None:
    concurrency = Concurrency(8)
    for _ in range(30):
        concurrency.ended(None, refused=False)
    assert concurrency.limit == 8
