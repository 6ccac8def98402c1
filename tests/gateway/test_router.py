"""Which engine gets a call when there is a choice."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from gateway.engines.affinity import ANYWHERE, CacheAffinity
from gateway.engines.policy import Policy
from gateway.engines.router import AFFINITY_SLACK, EngineRouter

URLS = ("http://one", "http://two", "http://three")
PROMPTS = [f"prompt-{number}" for number in range(60)]
NO_SESSION: Any = None


def make_router(*urls: str) -> EngineRouter:
    engines = EngineRouter(NO_SESSION, Policy("default"), wait_s=1)
    engines.set_urls(urls)
    for engine in engines.all.values():
        engine.healthy = True
    return engines


@pytest.fixture
def router() -> EngineRouter:
    return make_router(*URLS)


def chosen(router: EngineRouter, calls: int, affinity: CacheAffinity = ANYWHERE) -> list[str]:
    """The engines of calls that each end before the next begins."""

    async def acquire() -> list[str]:
        return [(await router.acquire(affinity, set())).url for _ in range(calls)]

    return asyncio.run(acquire())


def chosen_together(router: EngineRouter, calls: int, prompt_uid: str) -> list[str]:
    """The engines of calls that run at the same time."""
    urls = []
    for _ in range(calls):
        (url,) = chosen(router, 1, CacheAffinity(prompt_uid))
        router.all[url].running += 1
        urls.append(url)
    return urls


def engine_of(router: EngineRouter, prompt_uid: str) -> str:
    (url,) = chosen(router, 1, CacheAffinity(prompt_uid))
    return url


def test_idle_engines_take_turns(router: EngineRouter) -> None:
    assert Counter(chosen(router, 21)) == dict.fromkeys(URLS, 7)


def test_the_least_loaded_engine_is_chosen_whoever_is_next(router: EngineRouter) -> None:
    for engine in router.all.values():
        engine.running = 1
    router.all["http://two"].running = 0
    assert set(chosen(router, 5)) == {"http://two"}


def test_a_trajectory_stays_with_its_engine_and_others_share_the_rest(router: EngineRouter) -> None:
    affinity = CacheAffinity("prompt", "http://three")
    assert set(chosen(router, 4, affinity)) == {"http://three"}
    assert set(chosen(router, 2)) == {"http://one", "http://two"}


def test_the_first_calls_of_a_group_go_to_one_engine_and_groups_to_all(
    router: EngineRouter,
) -> None:
    engines = {prompt: set(chosen(router, 8, CacheAffinity(prompt))) for prompt in PROMPTS}
    assert all(len(urls) == 1 for urls in engines.values())
    groups = Counter(url for urls in engines.values() for url in urls)
    assert min(groups[url] for url in URLS) > len(PROMPTS) / 5


def test_a_group_that_is_too_large_for_one_engine_overflows_to_one_more_at_a_time(
    router: EngineRouter,
) -> None:
    urls, most = chosen_together(router, 60, "prompt"), AFFINITY_SLACK + 1
    first, second, _ = dict.fromkeys(urls)
    assert urls[: 2 * most] == [first] * most + [second] * most
    assert max(Counter(urls).values()) - min(Counter(urls).values()) <= most


def test_an_engine_with_much_to_do_gets_no_first_calls(router: EngineRouter) -> None:
    usual = engine_of(router, "prompt")
    router.all[usual].running = AFFINITY_SLACK + 1
    assert engine_of(router, "prompt") != usual


def test_gateways_agree_on_the_engine_of_a_group(router: EngineRouter) -> None:
    other = make_router(*reversed(URLS))
    chosen(other, 1)
    assert all(engine_of(router, prompt) == engine_of(other, prompt) for prompt in PROMPTS)


def test_an_engine_that_goes_moves_only_its_own_groups(router: EngineRouter) -> None:
    before = {prompt: engine_of(router, prompt) for prompt in PROMPTS}
    router.all["http://two"].healthy = False
    moved = [prompt for prompt in PROMPTS if engine_of(router, prompt) != before[prompt]]
    assert moved == [prompt for prompt in PROMPTS if before[prompt] == "http://two"]
