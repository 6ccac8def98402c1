"""Which weights sampled which tokens, and which may."""

from pathlib import Path

import openai
import pytest

from pool.connection import Connection
from pool.topics import POLICY
from schemas import PolicyVersion, Segment
from tests.gateway.client import eventually, response, steps
from tests.gateway.real_engine.calls import LONG, REAL, ask, paused_in_the_middle
from tests.gateway.running import RunningGateway, running_gateway
from tests.pool.log import write
from tests.vllm_engine import Engine

pytestmark = REAL


def test_segments_say_which_weights_sampled_which_tokens(
    gateway: RunningGateway, engine: Engine
) -> None:
    engine.label("1.3")
    before = engine.metric("vllm:generation_tokens_total")
    with paused_in_the_middle(gateway, engine) as (uid, stream):
        # Those that it was done with before it could be paused have all their tokens.
        sampled = engine.metric("vllm:generation_tokens_total") - before
        sampled %= LONG
        engine.label("1.4")
    parts = [getattr(part.choices[0], "token_ids", None) or () for part in stream]
    ids = [number for part in parts for number in part]
    (step,) = steps(gateway, uid)
    assert response(step)[-len(ids) :] == ids, "the rest of the stream"
    assert step.segments == [
        Segment(incarnation=1, version=3, first_token=0),
        Segment(incarnation=1, version=4, first_token=int(sampled)),
    ]


def test_an_engine_with_old_weights_gets_no_calls(
    log: Connection, engine: Engine, model: Path, uid: str, prompt_uid: str
) -> None:
    engine.label("1.3")
    run = f"run-{uid}"
    live = PolicyVersion(run=run, incarnation=1, version=4, phase="live")
    write(log, POLICY, [live])
    options = ("--run", run, "--engine-wait-s", "1")
    with running_gateway(log, [engine.url], model, *options, wait=False) as gateway:
        client = gateway.openai(uid, prompt_uid)
        eventually(lambda: _answers(gateway))
        eventually(lambda: "no engine" in str(gateway.get("/ready").body))
        generated = engine.metric("vllm:request_success_total")
        with pytest.raises(openai.InternalServerError) as refusal:
            ask(client, max_tokens=3)
        assert refusal.value.status_code == 503
        assert engine.metric("vllm:request_success_total") == generated
        engine.label("1.4")
        eventually(lambda: gateway.get("/ready").status == 200)
        ask(client, max_tokens=3)
        (step,) = steps(gateway, uid)
        assert step.segments == [Segment(incarnation=1, version=4, first_token=0)]


def _answers(gateway: RunningGateway) -> bool:
    try:
        return gateway.get("/health").status == 200
    except OSError:
        return False
