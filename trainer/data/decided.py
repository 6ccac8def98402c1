"""What a Decision keeps of the settings, so that it is trained again as it was."""

import json
from typing import NamedTuple

from pydantic import ValidationError

from schemas import Decision
from servicekit.errors import Fatal
from trainer.algorithm.settings import LossSettings
from trainer.data.batch import Limits
from trainer.model.settings import LearnerSettings


class Decided(NamedTuple):
    """How a Decision is trained."""

    loss: LossSettings
    learner: LearnerSettings
    limits: Limits


def described(decided: Decided) -> str:
    limits = {"max_age": decided.limits.max_age, "masks_stale": decided.limits.masks_stale}
    return json.dumps(
        {
            "loss": decided.loss.model_dump(),
            "learner": decided.learner.model_dump(),
            "limits": limits,
        }
    )


def settings_of(decision: Decision) -> Decided:
    given = json.loads(decision.settings)
    # Where a Decision does not name them, no token was masked, and then no age matters.
    limits = {"max_age": 0, "masks_stale": False, **given.get("limits", {})}
    try:
        return Decided(
            LossSettings.model_validate(given.get("loss", {})),
            LearnerSettings.model_validate(given.get("learner", {})),
            Limits(decision.run, limits["max_age"], limits["masks_stale"]),
        )
    except ValidationError as error:
        raise Fatal(
            f"version {decision.version} of run {decision.run} was made with settings that this "
            f"version of steplog does not know: {error.errors()[0]['msg']}"
        ) from error


def first_seed(decision: Decision) -> int:
    """The seed that its process began with; each Decision's own counts on from it."""
    return decision.seed - decision.sequence
