"""The settings that a Decision records, so that its batch can be trained again the same way."""

import json
from typing import NamedTuple

from pydantic import ValidationError

from schemas import Decision
from servicekit.errors import Fatal
from trainer.algorithm.settings import LossSettings
from trainer.data.batch import AgeLimits
from trainer.model.settings import LearnerSettings


class RecordedSettings(NamedTuple):
    """All settings that the training of one batch depends on."""

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
            LearnerSettings.model_validate(fields.get("learner", {})),
            AgeLimits(decision.run, limits["max_age"], limits["masks_stale"]),
        )
    except ValidationError as error:
        raise Fatal(
            f"version {decision.version} of run {decision.run} was made with settings that this "
            f"release of steplog does not accept: {error.errors()[0]['msg']}"
        ) from error


def initial_seed(decision: Decision) -> int:
    """The seed setting of the process; every Decision adds its sequence number to it."""
    return decision.seed - decision.sequence
