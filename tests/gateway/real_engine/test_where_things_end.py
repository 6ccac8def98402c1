"""Clients and engines that go away in the middle. The last test of the folder ends its engine."""

import os
import signal
import time

import openai
import pytest

from schemas import Step, StepNote
from tests.gateway.client import eventually, log_of, response
from tests.gateway.real_engine.calls import REAL, ask, paused_in_the_middle
from tests.gateway.running import RunningGateway
from tests.vllm_engine import Engine

pytestmark = REAL

SOME = 300


def test_a_client_that_leaves_has_a_step_with_a_note(
    gateway: RunningGateway, engine: Engine
) -> None:
    # Few enough that a busy engine is done with them before it is given up.
    with paused_in_the_middle(gateway, engine, SOME) as (uid, stream):
        stream.close()
    eventually(lambda: len(log_of(gateway, uid)) == 2)
    step, note = log_of(gateway, uid)
    assert isinstance(step, Step)
    assert isinstance(note, StepNote)
    assert len(response(step)) == SOME
    assert (note.step_id, note.delivered) == (step.step_id, False)
    eventually(lambda: engine.requests() == 0)


def test_a_generation_that_nobody_waits_for_is_given_up(
    gateway: RunningGateway, engine: Engine, client: openai.OpenAI
) -> None:
    with paused_in_the_middle(gateway, engine) as (uid, stream):
        left = time.monotonic()
        stream.close()
        eventually(lambda: engine.requests() == 0)
        assert time.monotonic() - left > 8  # it may come back within ten seconds
    assert log_of(gateway, uid) == []
    assert ask(client, max_tokens=1).usage.completion_tokens == 1


def test_an_engine_that_dies_ends_the_stream_with_an_error(
    gateway: RunningGateway, engine: Engine
) -> None:
    """The last one: nothing comes after it."""
    with paused_in_the_middle(gateway, engine) as (uid, stream):
        os.killpg(engine.pid, signal.SIGKILL)
        engine.process.wait()
    with pytest.raises(openai.APIError) as failure:
        list(stream)
    assert "engine" in str(failure.value)
    assert log_of(gateway, uid) == []
    eventually(lambda: gateway.get("/ready").status == 503)
