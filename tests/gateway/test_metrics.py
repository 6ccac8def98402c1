"""What Prometheus sees."""

import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from gateway import metrics
from tests.gateway.client import HELLO, RETRY, chat
from tests.gateway.running import RunningGateway

pytestmark = pytest.mark.broker


def families(gateway: RunningGateway) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    found = text_string_to_metric_families(str(gateway.get("/metrics").body))
    return {family.name: [(s.name, s.labels, s.value) for s in family.samples] for family in found}


def test_every_metric_of_the_gateway_is_there(gateway: RunningGateway) -> None:
    named = [found for found in vars(metrics).values() if isinstance(found, MetricWrapperBase)]
    names = {family.name for collector in named for family in collector.collect()}
    assert len(names) > 15
    assert names <= set(families(gateway))


def test_a_call_is_counted(gateway: RunningGateway, uid: str, prompt_uid: str) -> None:
    def now() -> list[float]:
        return [
            gateway.metric("steps_published_total", channel="train"),
            gateway.metric("http_requests_total", route="/…/chat/completions", code="200"),
            gateway.metric("http_request_duration_seconds_count", route="/…/chat/completions"),
            gateway.metric("step_tokens_count", part="prompt"),
            gateway.metric("step_tokens_sum", part="response"),
            gateway.metric("gateway_upstream_duration_seconds_count"),
            gateway.metric("gateway_time_to_first_token_seconds_count"),
        ]

    before = now()
    chat(gateway, uid, prompt_uid, stream=True)
    assert [after - then for after, then in zip(now(), before, strict=True)] == [
        1, 1, 1, 1, 8, 1, 1,
    ]  # fmt: skip


def test_acknowledgements_are_timed(gateway: RunningGateway, uid: str, prompt_uid: str) -> None:
    before = gateway.metric("publish_ack_seconds_count")
    chat(gateway, uid, prompt_uid)
    assert gateway.metric("publish_ack_seconds_count") == before + 2  # the registration as well


def test_a_channel_that_an_agent_made_up_is_no_label(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    before = gateway.metric("steps_published_total", channel="other")
    gateway.post(f"/{uid}/{prompt_uid}/v1/register_trajectory", {"channel": uid})
    chat(gateway, uid, prompt_uid)
    assert gateway.metric("steps_published_total", channel="other") == before + 1
    assert uid not in str(gateway.get("/metrics").body)


def test_no_label_names_a_trajectory_a_prompt_or_a_key(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid, headers={"authorization": "Bearer secret-key"})
    gateway.get(f"/{uid}/nowhere")
    told = str(gateway.get("/metrics").body)
    assert not any(word in told for word in (uid, prompt_uid, "secret-key"))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"top_p": 0.5}, "gateway_not_trainable_steps_total"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "no"}, *HELLO]}, ""),
    ],
)
def test_steps_that_cannot_be_trained_and_rewritten_prompts_are_counted(
    gateway: RunningGateway, uid: str, prompt_uid: str, settings: dict[str, object], name: str
) -> None:
    chat(gateway, uid, prompt_uid)
    name, labels = (name, {}) if name else ("gateway_prompts_total", {"kind": "rewritten"})
    before = gateway.metric(name, **labels)
    path = f"/{uid}/{prompt_uid}/v1/chat/completions"
    gateway.post(path, {"messages": HELLO, **settings})
    assert gateway.metric(name, **labels) == before + 1


def test_retries_are_counted_by_how_they_were_answered(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    before = gateway.metric("gateway_retries_served_total", how="rebuilt")
    chat(gateway, uid, prompt_uid)
    chat(gateway, uid, prompt_uid, headers=RETRY)
    assert gateway.metric("gateway_retries_served_total", how="rebuilt") == before + 1


def test_nothing_is_in_flight_afterwards(
    gateway: RunningGateway, uid: str, prompt_uid: str
) -> None:
    chat(gateway, uid, prompt_uid)
    assert gateway.metric("gateway_inflight_requests") == 1  # the question itself
    assert gateway.metric("gateway_usable_engines") == 1
