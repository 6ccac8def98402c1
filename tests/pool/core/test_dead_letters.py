import pytest

from pool.core.dead_letters import DeadLetter, PoisonLimiter
from servicekit.errors import TooManyPoison

LETTER = DeadLetter(
    topic="steplog.steps",
    partition=3,
    offset=42,
    key=b"prompt-1",
    value=b"garbage",
    headers=[("trace", b"abc"), ("steplog.reason", b"of an earlier stage")],
    timestamp=1_700_000_000_000,
)


def test_a_letter_says_where_the_record_lay_and_why_it_is_dead() -> None:
    headers = dict(LETTER.headers_with("reward", "the value is empty"))
    assert headers == {
        "trace": b"abc",
        "steplog.topic": b"steplog.steps",
        "steplog.partition": b"3",
        "steplog.offset": b"42",
        "steplog.timestamp": b"1700000000000",
        "steplog.stage": b"reward",
        "steplog.reason": b"the value is empty",
    }


def test_the_original_headers_stay_and_the_last_of_a_name_counts() -> None:
    headers = LETTER.headers_with("reward", "the value is empty")
    assert headers[:2] == [("trace", b"abc"), ("steplog.reason", b"of an earlier stage")]
    assert headers[-1] == ("steplog.reason", b"the value is empty")


def test_single_bad_records_pass() -> None:
    limiter = PoisonLimiter(window=10, least=3, share=0.5)
    for _ in range(100):
        limiter.count_good()
        limiter.count_good()
        limiter.count_good()
        limiter.count_bad("it is garbage")


def test_a_few_bad_records_pass_even_when_there_is_nothing_else() -> None:
    limiter = PoisonLimiter(window=10, least=3, share=0.5)
    limiter.count_bad("it is garbage")
    limiter.count_bad("it is garbage")


def test_a_broken_deployment_stops_and_says_why() -> None:
    limiter = PoisonLimiter(window=10, least=3, share=0.5)
    limiter.count_good()
    limiter.count_good()
    limiter.count_bad("a")
    limiter.count_bad("b")
    with pytest.raises(TooManyPoison, match=r"3 of the last 5 .* because c;"):
        limiter.count_bad("c")


def test_exactly_the_allowed_share_of_bad_records_passes() -> None:
    limiter = PoisonLimiter(window=6, least=3, share=0.5)
    for _ in range(20):
        limiter.count_good()
        limiter.count_bad("it is garbage")


def test_the_limiter_stays_stopped_while_bad_records_come() -> None:
    limiter = PoisonLimiter(window=10, least=1, share=0.5)
    for _ in range(30):
        with pytest.raises(TooManyPoison):
            limiter.count_bad("it is garbage")


def test_only_the_window_counts() -> None:
    limiter = PoisonLimiter(window=4, least=3, share=0.5)
    limiter.count_bad("old")
    limiter.count_bad("old")
    for _ in range(4):
        limiter.count_good()
    limiter.count_bad("new")
    limiter.count_bad("new")  # two of the last four: the old ones have left the window
    with pytest.raises(TooManyPoison, match="3 of the last 4"):
        limiter.count_bad("new")


def test_a_long_good_past_does_not_hide_a_broken_deployment() -> None:
    limiter = PoisonLimiter(window=1000, least=100, share=0.5)
    for _ in range(10_000):
        limiter.count_good()
    with pytest.raises(TooManyPoison, match="501 of the last 1000"):
        for _ in range(501):
            limiter.count_bad("it is garbage")


def test_by_default_a_reader_that_understands_nothing_stops_after_a_hundred_records() -> None:
    limiter = PoisonLimiter()
    for _ in range(99):
        limiter.count_bad("it is garbage")
    with pytest.raises(TooManyPoison, match="100 of the last 100"):
        limiter.count_bad("it is garbage")
