"""Which engine gets a call when there is a choice."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from gateway.engines.policy import Policy
from gateway.engines.router import EngineRouter

URLS = ("http://one", "http://two", "http://three")
NO_SESSION: Any = None


@pytest.fixture
def router() -> EngineRouter:
    engines = EngineRouter(NO_SESSION, Policy("default"), wait_s=1)
    engines.set_urls(URLS)
    for engine in engines.all.values():
        engine.healthy = True
    return engines


def chosen(router: EngineRouter, calls: int, favourite: str | None = None) -> list[str]:
    """The engines of calls that each end before the next begins."""

    async def acquire() -> list[str]:
        return [(await router.acquire(favourite, set())).url for _ in range(calls)]

    return asyncio.run(acquire())


def test_idle_engines_take_turns(router: EngineRouter) -> None:
    assert Counter(chosen(router, 21)) == dict.fromkeys(URLS, 7)


def test_the_least_loaded_engine_is_chosen_whoever_is_next(router: EngineRouter) -> None:
    for engine in router.all.values():
        engine.running = 1
    router.all["http://two"].running = 0
    assert set(chosen(router, 5)) == {"http://two"}


def test_a_trajectory_stays_with_its_engine_and_others_share_the_rest(router: EngineRouter) -> None:
    assert set(chosen(router, 4, "http://three")) == {"http://three"}
    assert set(chosen(router, 2)) == {"http://one", "http://two"}
