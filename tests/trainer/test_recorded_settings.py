"""What a Decision and its Outcome record of the settings, and who uses it."""

import json
from typing import Any

from schemas import Decision, Outcome
from trainer.algorithm.settings import LossSettings
from trainer.data.batch import AgeLimits
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.recorded_settings import (
    RecordedSettings,
    decode_execution,
    decode_settings,
    encode_settings,
)

LIMITS = AgeLimits("run", 3, True)


def decision(settings: str) -> Decision:
    return Decision(run="run", incarnation=1, sequence=1, version=1, settings=settings)


def outcome(machine: dict[str, Any]) -> Outcome:
    return Outcome(run="run", incarnation=1, sequence=1, version=1, machine=json.dumps(machine))


def test_a_decision_records_what_is_computed_and_not_how() -> None:
    recorded = RecordedSettings(LossSettings(), LearnerSettings(warmup=3), LIMITS)
    made = decision(encode_settings(recorded))
    assert decode_settings(made) == recorded
    assert not ExecutionSettings.model_fields.keys() & json.loads(made.settings)["learner"].keys()


def test_decisions_of_earlier_releases_recorded_the_execution_too() -> None:
    learner = {"warmup": 3, "tokens_per_pack": 512, "gradient_checkpointing": True, "compile": True}
    made = decision(json.dumps({"learner": learner}))
    assert decode_settings(made).learner == LearnerSettings(warmup=3)
    used = ExecutionSettings(tokens_per_pack=512, gradient_checkpointing=True)
    assert decode_execution(made, None) == used
    assert decode_execution(made, outcome({"device": "cpu"})) == used


def test_the_execution_settings_of_a_batch_are_those_of_its_outcome() -> None:
    made = decision(json.dumps({"learner": {"tokens_per_pack": 512}}))
    execution = ExecutionSettings(tokens_per_pack=256, compile=False)
    recorded = outcome({"device": "cpu", "execution": execution.model_dump()})
    assert decode_execution(made, recorded) == execution
