"""Refused requests: which are retried, by the real clients, and after how long."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from gateway.errors import (
    ApiError,
    BadRequest,
    Conflict,
    NotConfigured,
    NotFound,
    TooLarge,
    TooMany,
    Unauthorized,
    Unavailable,
    Unprocessable,
)
from gateway.http.endpoint import RequestLimit, openai_error
from gateway.http.exchange import Exchange
from gateway.http.keys import Keys
from gateway.state.index import TrajectoryIndex
from gateway.waits import LONGEST_S, EventPace, retry_seconds
from tests.gateway.test_admission_fold import closed, decided, fold, left_over, registered

HELLO: Any = [{"role": "user", "content": "hello"}]
FINAL = [BadRequest, Conflict, NotConfigured, NotFound, TooLarge, Unauthorized, Unprocessable]


class Refusals:
    """HTTP on which every request is refused; counts them."""

    def __init__(self, error: ApiError) -> None:
        self.count = 0
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._refuse))
        self._error = error

    def _refuse(self, _: httpx2.Request) -> httpx2.Response:
        self.count += 1
        return httpx2.Response(
            self._error.status, content=openai_error(self._error), headers=self._error.headers()
        )


@contextmanager
def refused_clients(refusals: Refusals) -> Iterator[list[Any]]:
    from anthropic import Anthropic
    from openai import OpenAI

    options: Any = {"api_key": "k", "base_url": "http://g", "http_client": refusals.http}
    with OpenAI(**options, max_retries=1) as openai, Anthropic(**options, max_retries=1) as claude:
        yield [
            lambda: openai.chat.completions.create(model="m", messages=HELLO),
            lambda: claude.messages.create(model="m", max_tokens=5, messages=HELLO),
        ]


@pytest.mark.parametrize("kind", FINAL)
def test_clients_do_not_repeat_a_request_that_would_fail_again(kind: type[ApiError]) -> None:
    refusals = Refusals(kind("No."))
    with refused_clients(refusals) as calls:
        for number, call in enumerate(calls, 1):
            with pytest.raises(Exception, match="No"):
                call()
            assert refusals.count == number


@pytest.mark.parametrize("kind", [TooMany, Unavailable])
def test_clients_wait_as_long_as_they_are_told(
    kind: type[TooMany | Unavailable], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    refusals = Refusals(kind("No.", wait_s=37.5))
    with refused_clients(refusals) as calls:
        for call in calls:
            with pytest.raises(Exception, match="No"):
                call()
    assert refusals.count == 4
    assert waits == [38.0, 38.0]


@pytest.mark.parametrize(("wait", "told"), [(-3, 1), (0, 1), (0.2, 1), (7.1, 8), (1e9, LONGEST_S)])
def test_a_wait_is_a_number_of_seconds_that_clients_accept(wait: float, told: int) -> None:
    assert retry_seconds(wait) == told


def pace_of(*events: float) -> EventPace:
    pace = EventPace()
    for at in events:
        pace.record(at)
    return pace


def test_the_next_event_is_due_after_the_usual_interval() -> None:
    assert pace_of(0, 30, 60).expected_wait(now=65) == 25


def test_a_pause_is_not_the_usual_interval() -> None:
    assert pace_of(0, 10, 20, 7200, 7210).expected_wait(now=7214) == 6


def test_an_event_that_is_overdue_takes_as_long_again_as_it_is_overdue() -> None:
    pace = pace_of(0, 10)
    assert pace.expected_wait(now=15) == 5
    assert pace.expected_wait(now=27) == 7


def test_after_a_pause_nothing_is_overdue_before_somebody_waits() -> None:
    pace = pace_of(0, 10)
    assert [pace.expected_wait(now) for now in (3600, 3601, 3604)] == [0, 1, 4]


def test_an_event_that_never_came_takes_as_long_again_as_clients_have_waited() -> None:
    pace = EventPace()
    assert [pace.expected_wait(now) for now in (100, 103, 140)] == [0, 3, 40]


def test_a_refused_group_waits_for_the_next_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = [decided("a", created_at=at * 1000) for at in (1_000, 1_040, 1_080)]
    admission = fold(registered("a"), registered("b", "q"), *decisions)
    monkeypatch.setattr("time.time", lambda: 1_090.0)
    assert admission.expected_wait() == 30


def test_verdicts_without_groups_free_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = [decided("a", created_at=at * 1000) for at in (1_000, 1_040)]
    admission = fold(*decisions, left_over("a", created_at=1_050_000))
    monkeypatch.setattr("time.time", lambda: 1_060.0)
    assert admission.expected_wait() == 20


def test_a_tenant_with_too_many_trajectories_waits_for_one_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, now = TrajectoryIndex(), iter([100.0, 110.0, 130.0, 134.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    assert index.expected_wait("") == 0
    for uid in ("a", "b"):
        index.put(registered(uid))
        index.put(closed(uid))
    assert index.expected_wait("") == 16


def test_a_caller_with_too_many_requests_waits_for_one_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, now = RequestLimit(Keys({}), 2), iter([0.0, 20.0, 60.0, 65.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    exchange = Exchange({"headers": []}, None, None, 0)
    callers = [limit.enter(exchange) for _ in range(3)]
    assert refused_for(limit, callers.pop()) == 1
    for caller in callers:  # two end, and two others begin
        limit.leave(caller)
        limit.enter(exchange)
    limit.enter(exchange)
    assert refused_for(limit, "") == 35


def refused_for(limit: RequestLimit, caller: str) -> int:
    with pytest.raises(TooMany) as refusal:
        limit.check(caller)
    limit.leave(caller)
    return refusal.value.retry_after
