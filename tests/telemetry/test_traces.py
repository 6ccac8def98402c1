"""From an agent's call to the version that it trained."""

import pytest

from pool.topics import REWARDED, STEPS
from schemas import Step, TrajectoryEnd
from servicekit.tracing import traceparent_of
from tests.pool.log import messages
from tests.telemetry.collector import SeenSpan
from tests.telemetry.pipeline import (
    AGENT,
    AGENT_SPAN,
    ANSWER,
    KEY,
    LONG_S,
    QUESTION,
    RUN,
    WRONG,
    Told,
)

pytestmark = [
    pytest.mark.broker,
    pytest.mark.slow,
    pytest.mark.timeout(LONG_S),
]


def only(spans: list[SeenSpan]) -> SeenSpan:
    (span,) = spans
    return span


def of_agent(told: Told, name: str) -> SeenSpan:
    """The one span of this name in the trace that the agent began."""
    return only([span for span in told.collector.named(name) if span.trace_id == AGENT])


def test_one_trace_goes_from_the_agents_call_to_the_version(told: Told) -> None:
    topic = told.connection.topic_name(STEPS)
    call = of_agent(told, "POST /…/chat/completions")
    assert call.service == "steplog-gateway" and call.parent_id == AGENT_SPAN
    assert call.about["http.response.status_code"] == 200
    assert call.about["steplog.trajectory_uid"] == told.uids["good"]
    generated = of_agent(told, "chat tiny")
    assert generated.parent_id == call.span_id and generated.events == ["first_token"]
    assert generated.about["gen_ai.usage.output_tokens"] == len(ANSWER) + 1
    assert generated.about["gen_ai.usage.input_tokens"] > len(QUESTION)

    uid = told.uids["good"]
    sent = only(told.collector.named(f"send {topic}", trajectory_uid=uid, record="Step"))
    assert (sent.trace_id, sent.parent_id) == (AGENT, call.span_id)
    assert sent.about["steplog.step_id"] == call.about["steplog.step_id"]
    assert sent.about["messaging.kafka.offset"] >= 0
    ended = only(told.collector.named(f"send {topic}", trajectory_uid=uid, record="TrajectoryEnd"))

    scored = of_agent(told, f"process {topic}")
    assert scored.service == "steplog-reward" and scored.parent_id == ended.span_id
    assert scored.links == [sent.span_id]

    trained = of_agent(told, "trained")
    assert trained.service == "steplog-train" and trained.parent_id == scored.span_id
    assert trained.about["steplog.run"] == RUN
    assert (trained.about["steplog.version"], trained.about["steplog.incarnation"]) == (1, 1)


def test_a_version_has_a_trace_that_leads_to_its_trajectories(told: Told) -> None:
    whole = only(told.collector.named("version", version=1))
    parts = [s for s in told.collector.spans if s.parent_id == whole.span_id]
    assert [s.name for s in parts] == ["decide", "train", "open", "sync", "live"]
    assert {s.about["steplog.version"] for s in parts} == {1}
    train = only(told.collector.named("train"))
    scored = told.collector.named(f"process {told.connection.topic_name(STEPS)}")
    batch = [s for s in scored if s.about["steplog.prompt_uid"] == "alice/camels"]
    assert sorted(train.links) == sorted(s.span_id for s in batch) and len(batch) == 2
    backwards = told.collector.named("trained")
    assert {s.trace_id for s in backwards} == {s.trace_id for s in batch}
    assert all(s.links == [train.span_id] for s in backwards)


def test_a_failed_call_and_a_failed_reward_are_failed_spans(told: Told) -> None:
    calls = told.collector.named("POST /…/chat/completions", trajectory_uid=told.uids["broken"])
    assert only(calls).is_failed and only(calls).about["http.response.status_code"] == 502
    tries = [s for s in told.collector.spans if s.parent_id == only(calls).span_id]
    assert {s.about["error.type"] for s in tries} == {"EngineError"}
    topic = told.connection.topic_name(STEPS)
    odd = only(told.collector.named(f"process {topic}", trajectory_uid=told.uids["odd"]))
    assert odd.is_failed and odd.about["error.type"] == "picky"


def test_records_carry_the_span_that_wrote_them(told: Told) -> None:
    codec = told.connection.codec()
    found: dict[tuple[str, type], str] = {}
    for topic in (STEPS, REWARDED):
        for message in messages(told.connection, topic):
            if message.key == b"alice/camels":
                record = codec.decode(message.value)
                if getattr(record, "trajectory_uid", "") == told.uids["good"]:
                    found[topic, type(record)] = traceparent_of(message.headers)
    assert found[STEPS, Step] == found[REWARDED, Step]
    scored = of_agent(told, f"process {told.connection.topic_name(STEPS)}")
    assert found[REWARDED, TrajectoryEnd] == f"00-{AGENT}-{scored.span_id}-01"


def test_no_span_says_what_was_said_or_a_key(told: Told) -> None:
    everything = b"".join(told.collector.bodies)
    assert told.uids["good"].encode() in everything
    for secret in (QUESTION, ANSWER, WRONG, KEY, *told.signatures):
        assert secret and secret.encode() not in everything
