"""The settings that the ledger records, so that a batch can be trained again the same way: what is
computed in the Decision, and how it was computed in the Outcome."""

import json
from typing import NamedTuple

from pydantic import ValidationError

from schemas import Decision, Outcome
from servicekit.errors import Fatal
from trainer.algorithm.settings import LossSettings
from trainer.data.batch import AgeLimits
from trainer.model.settings import ExecutionSettings, LearnerSettings


class RecordedSettings(NamedTuple):
    """All settings that the training of one batch depends on, except for rounding."""

    loss: LossSettings
    learner: LearnerSettings
    limits: AgeLimits


def encode_settings(settings: RecordedSettings) -> str:
    """JSON for the field `settings` of a Decision."""
    limits = {"max_age": settings.limits.max_age, "masks_stale": settings.limits.masks_stale}
    return json.dumps(
        {
            "loss": settings.loss.model_dump(),
            "learner": settings.learner.model_dump(),
            "limits": limits,
        }
    )


def decode_settings(decision: Decision) -> RecordedSettings:
    fields = json.loads(decision.settings)
    # A Decision that does not name limits masked no token, so its largest age is irrelevant.
    limits = {"max_age": 0, "masks_stale": False, **fields.get("limits", {})}
    try:
        return RecordedSettings(
            LossSettings.model_validate(fields.get("loss", {})),
            LearnerSettings.from_record(fields.get("learner", {})),
            AgeLimits(decision.run, limits["max_age"], limits["masks_stale"]),
        )
    except ValidationError as error:
        raise Fatal(
            f"version {decision.version} of run {decision.run} was made with settings that this "
            f"release of steplog does not accept: {error.errors()[0]['msg']}"
        ) from error


def decode_execution(decision: Decision, outcome: Outcome | None) -> ExecutionSettings:
    """The execution settings that the Decision was trained with. Earlier releases trained it with those
    that it recorded itself."""
    machine = json.loads(outcome.machine) if outcome is not None else {}
    fields = machine.get("execution", json.loads(decision.settings).get("learner", {}))
    names = fields.keys() & ExecutionSettings.model_fields.keys()
    return ExecutionSettings.model_validate({name: fields[name] for name in names})


def initial_seed(decision: Decision) -> int:
    """The seed setting of the process; every Decision adds its sequence number to it."""
    return decision.seed - decision.sequence
