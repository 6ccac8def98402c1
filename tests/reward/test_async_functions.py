"""Asynchronous functions: how many at once, what an outage does, and what counts as an attempt."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reward.scoring import async_functions
from reward.scoring.async_functions import REASSIGNED, AsyncFunctions
from reward.scoring.loading import RewardFunction
from reward.scoring.results import FunctionResult
from reward.scoring.trajectory_view import view
from steplog.rewards import Reward, RewardFailed, RewardUnavailable, Trajectory
from tests.pool.records import end, step, trajectory_of


@pytest.fixture
def remotes() -> Iterator[Callable[..., AsyncFunctions]]:
    made: list[AsyncFunctions] = []

    def make(call: Callable[[Any], Any], **limits: Any) -> AsyncFunctions:
        made.append(AsyncFunctions([RewardFunction("f", "1", call, **limits)]))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_functions, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(async_functions, "LONGEST_PAUSE_S", 0.01)


def make_trajectory(uid: str = "t") -> Trajectory:
    return view(trajectory_of(step(f"{uid}-0", uid), end(uid, steps=1)), lambda ids: str(list(ids)))


def only(remote: AsyncFunctions, **more: Any) -> FunctionResult:
    [result] = remote.run(remote.score(make_trajectory(), **more))
    return result  # type: ignore[no-any-return]


class Crowd:
    """Counts how many are inside at the same time."""

    def __init__(self, room: int) -> None:
        self.inside = self.most = self.calls = 0
        self.room = room
        self.full = asyncio.Event()
        self.open = asyncio.Event()

    async def enter(self, _: object) -> float:
        self.calls += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.inside == self.room:
            self.full.set()
        await self.open.wait()
        self.inside -= 1
        return 1.0


async def ask_many(remote: AsyncFunctions, crowd: Crowd, count: int) -> list[list[FunctionResult]]:
    asked = [asyncio.ensure_future(remote.score(make_trajectory(f"t{n}"))) for n in range(count)]
    await crowd.full.wait()
    await asyncio.sleep(0.05)
    crowd.open.set()
    return await asyncio.gather(*asked)


def test_as_many_run_at_once_as_may_and_no_more(remotes: Callable[..., AsyncFunctions]) -> None:
    crowd = Crowd(100)
    remote = remotes(crowd.enter, at_once=100)
    answers = remote.run(ask_many(remote, crowd, 250))
    assert (crowd.most, crowd.calls) == (100, 250)
    assert [result.value for [result] in answers] == [1.0] * 250


def test_a_full_function_does_not_hold_up_another_one() -> None:
    crowd = Crowd(1)

    async def quick(_: object) -> float:
        return 2.0

    remote = AsyncFunctions(
        [RewardFunction("slow", "1", crowd.enter, at_once=1), RewardFunction("quick", "1", quick)]
    )
    try:
        answers = remote.run(ask_many(remote, crowd, 3))
    finally:
        remote.close()
    assert crowd.most == 1
    assert [[o.value for o in results] for results in answers] == [[1.0, 2.0]] * 3


def test_an_outage_is_waited_for_however_long_and_is_no_attempt(
    remotes: Callable[..., AsyncFunctions], caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    async def judge(_: object) -> float:
        nonlocal calls
        calls += 1
        if calls <= 20:
            raise RewardUnavailable("no connection")
        return 0.5

    result = only(remotes(judge, attempts=1))
    assert (result.value, result.failure, calls) == (0.5, None, 21)
    assert [r.message for r in caplog.records] == [
        "reward f is unavailable, its trajectories wait: no connection"
    ]


def test_nobody_waits_for_an_outage_on_behalf_of_another_worker(
    remotes: Callable[..., AsyncFunctions],
) -> None:
    asked = 0

    async def judge(_: object) -> float:
        nonlocal asked
        asked += 1
        raise RewardUnavailable("no connection")

    result = only(remotes(judge), is_wanted=lambda: asked < 5)
    assert (result.failure, asked) == (REASSIGNED, 5)


def test_who_waits_for_room_is_not_asked_when_nobody_wants_it(
    remotes: Callable[..., AsyncFunctions],
) -> None:
    crowd = Crowd(1)
    remote = remotes(crowd.enter, at_once=1)

    async def ask() -> list[list[FunctionResult]]:
        first = asyncio.ensure_future(remote.score(make_trajectory("first")))
        await crowd.full.wait()
        second = asyncio.ensure_future(remote.score(make_trajectory("second"), lambda: False))
        crowd.open.set()
        return [await first, await second]

    [[asked], [unasked]] = remote.run(ask())
    assert (asked.value, unasked.failure, crowd.calls) == (1.0, REASSIGNED, 1)


def test_the_room_is_free_while_one_waits_for_an_outage(
    remotes: Callable[..., AsyncFunctions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_functions, "FIRST_PAUSE_S", 30.0)
    seen: list[str] = []

    async def judge(trajectory: Trajectory) -> float:
        seen.append(trajectory.uid)
        if trajectory.uid == "away":
            raise RewardUnavailable("no connection")
        return 1.0

    remote = remotes(judge, at_once=1)
    remote.start(remote.score(make_trajectory("away")))
    [result] = remote.run(remote.score(make_trajectory("here")))
    assert (result.value, seen) == (1.0, ["away", "here"])


def raising(error: BaseException) -> Callable[[object], Any]:
    async def judge(_: object) -> float:
        judge.calls += 1  # type: ignore[attr-defined]
        raise error

    judge.calls = 0  # type: ignore[attr-defined]
    return judge


@pytest.mark.parametrize(
    ("error", "calls", "why"),
    [
        (ValueError("no"), 3, "ValueError: no"),
        (RewardFailed("never"), 1, "never"),
        (asyncio.CancelledError(), 3, "CancelledError: "),
        (SystemExit(1), 3, "SystemExit: 1"),
        (ValueError("half a \ud83d"), 3, "ValueError: half a ?"),
    ],
)
def test_what_a_function_raises_fails_its_trajectory_after_the_attempts(
    remotes: Callable[..., AsyncFunctions], error: BaseException, calls: int, why: str
) -> None:
    judge = raising(error)
    remote = remotes(judge, attempts=3)
    assert only(remote).failure == why
    assert judge.calls == calls  # type: ignore[attr-defined]
    assert remote.error is None


def test_a_function_that_does_not_come_back_is_given_up_after_its_time(
    remotes: Callable[..., AsyncFunctions],
) -> None:
    async def judge(_: object) -> None:
        await asyncio.sleep(1000)

    result = only(remotes(judge, timeout_s=0.01, attempts=2))
    assert result.failure == "it did not return within 0.01 s, in each of 2 attempts"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (float("inf"), "it returned a number that is not finite"),
        ("much", "it returned str; a reward is a number, a Reward or None"),
        (Reward(1.0, steps=[0.5, float("nan")]), "it returned a number that is not finite"),
        (Reward(1.0, details={"why": "x" * 300_000}), "its details are 300010 characters long"),
        (Reward(1.0, details={"why": object()}), "TypeError: "),
    ],
)
def test_what_is_no_reward_fails_the_trajectory(
    remotes: Callable[..., AsyncFunctions], given: Any, why: str
) -> None:
    async def judge(_: object) -> Any:
        return given

    assert str(only(remotes(judge, attempts=1)).failure).startswith(why)


def test_a_long_story_is_cut(remotes: Callable[..., AsyncFunctions]) -> None:
    failure = only(remotes(raising(ValueError("x" * 10_000_000)), attempts=1)).failure
    assert failure is not None and len(failure) < 10_000


def test_closing_does_not_wait_for_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    began = threading.Event()

    async def judge(_: object) -> None:
        began.set()
        await asyncio.sleep(1000)

    remote = AsyncFunctions([RewardFunction("f", "1", judge)])
    remote.start(remote.score(make_trajectory()))
    assert began.wait(60)
    before = time.monotonic()
    remote.close()
    assert time.monotonic() - before < 60
    assert remote.error is None and not caplog.records


def test_something_started_that_ends_is_noticed(remotes: Callable[..., AsyncFunctions]) -> None:
    async def server() -> None:
        raise SystemExit(1)  # as uvicorn does

    remote = remotes(raising(ValueError()))
    remote.start(server())
    deadline = time.monotonic() + 60
    while remote.error is None:
        assert time.monotonic() < deadline
    assert only(remote).failure == "ValueError: "
