"""Lines of the log as JSON: what every service says, and what none may say."""

import json

import pytest

from pool.topics import STEPS
from tests.telemetry.pipeline import ANSWER, KEY, LONG_S, QUESTION, RUN, WRONG, Told

pytestmark = [
    pytest.mark.broker,
    pytest.mark.slow,
    pytest.mark.timeout(LONG_S),
]

SERVICES = ["gateway", "reward", "train"]


@pytest.mark.parametrize("service", SERVICES)
def test_every_line_is_json(told: Told, service: str) -> None:
    lines = told.lines(service)
    assert len(lines) > 2
    for line in lines:
        assert {"time", "level", "service", "logger", "message"} <= line.keys()
        assert line["service"] == service
    assert lines[0]["message"].startswith(f"{service}: ")


def test_lines_about_a_trajectory_name_it(told: Told) -> None:
    failed = told.line("gateway", "LLM call failed: EngineFailed")
    assert failed["level"] == "WARNING" and failed["run"] == RUN
    assert (failed["trajectory_uid"], failed["prompt_uid"]) == (
        told.uids["broken"],
        "alice/broken",
    )
    assert failed["step_id"] and len(failed["trace_id"]) == 32
    odd = told.line("reward", "reward picky failed")
    assert (odd["trajectory_uid"], odd["run"]) == (told.uids["odd"], RUN)
    assert told.line("reward", "has expired")["trajectory_uid"] == told.uids["slow"]
    dead = told.line("reward", "goes to dead-letters")
    assert dead["topic"] == told.connection.topic_name(STEPS) and dead["offset"] >= 0


def test_lines_about_a_version_name_it(told: Told) -> None:
    for words in ("Decision 1: training version 1 on 1 groups", "version 1: reward "):
        line = told.line("train", words)
        assert (line["run"], line["version"], line["incarnation"]) == (RUN, 1, 1)


def test_other_peoples_lines_have_the_same_shape(told: Told) -> None:
    assert any(line["logger"] == "uvicorn.error" for line in told.lines("gateway"))


@pytest.mark.parametrize("service", SERVICES)
def test_no_line_says_what_was_said_or_a_key(told: Told, service: str) -> None:
    text = told.logs[service]
    engines_words = "the script says so"
    for secret in (QUESTION, ANSWER, WRONG, KEY, engines_words, *told.signatures):
        assert secret and secret not in text
        assert json.dumps(secret)[1:-1] not in text
