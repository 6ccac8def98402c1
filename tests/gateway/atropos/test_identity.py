"""Who an environment is that registers while a namesake is silent."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway.atropos import server as module
from gateway.atropos.log.retries import RetryDetector
from gateway.atropos.log.writer import LogWriter
from gateway.atropos.server import AtroposServer
from gateway.atropos.state.events import AnyEvent, Began, Env, Registered, Resized
from gateway.atropos.state.state import AtroposState
from tests.gateway.atropos.test_state import TRAINING

HOST = "10.0.0.1"


class MemoryLog:
    """Applies events at once; nothing is written."""

    def __init__(self, state: AtroposState) -> None:
        self._state = state

    async def append_event(self, event: AnyEvent, result: Callable[[], Any]) -> Any:
        self._state.apply(self._state.applied + 1, event)
        return result()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
async def atropos(clock: Clock) -> AtroposServer:
    state = AtroposState()
    for event in (Registered(training=TRAINING), Began()):
        state.apply(state.applied + 1, event)
    writer = cast(LogWriter, MemoryLog(state))
    return AtroposServer(state, RetryDetector(), writer, silent_after_s=60, max_queue=None)


async def join(atropos: AtroposServer, host: str = HOST, **fields: Any) -> int:
    about = {"max_context_len": 512, "weight": 1.0, "desired_name": "maths", "group_size": 4}
    env = Env(**{**about, "host": host, **fields})
    env.registered_group_size = env.group_size
    joined: int = (await atropos.register_env(env))["env_id"]
    return joined


async def test_a_namesake_with_another_group_size_takes_no_place(
    atropos: AtroposServer, clock: Clock
) -> None:
    assert await join(atropos) == 0
    clock.now = 16
    assert await join(atropos, group_size=8) == 1
    assert await join(atropos, max_context_len=2048) == 2
    status = await atropos.status_env(0)
    assert status is not None and atropos.state.envs[0].group_size == 4


async def test_a_restart_takes_its_own_place_though_it_was_tuned(
    atropos: AtroposServer, clock: Clock
) -> None:
    assert await join(atropos) == 0
    clock.now = 16
    assert await join(atropos, weight=3.0, min_batch_allocation=0.5) == 0
    assert atropos.state.envs[0].weight == 3.0


async def test_a_restart_is_known_after_larger_groups_were_posted(
    atropos: AtroposServer, clock: Clock
) -> None:
    assert await join(atropos) == 0
    atropos.state.apply(atropos.state.applied + 1, Resized(env_id=0, group_size=16))
    clock.now = 16
    assert await join(atropos) == 0


async def test_another_machine_takes_the_place_of_one_that_is_certainly_gone_only(
    atropos: AtroposServer, clock: Clock
) -> None:
    assert await join(atropos) == 0
    clock.now = 16
    assert await join(atropos, host="10.0.0.2") == 1
    clock.now = 61
    assert await join(atropos, host="10.0.0.3") == 0
