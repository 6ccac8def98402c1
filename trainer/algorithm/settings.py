"""The settings of the loss. Settings that contradict each other, or would do nothing, are refused."""

from collections.abc import Mapping
from typing import Self

from pydantic import model_validator

from trainer.algorithm import guards
from trainer.algorithm.choices import DRIFT_DEFAULTS, LOSS_DEFAULTS, MASK_DEFAULTS, RHO_DEFAULTS
from trainer.algorithm.loss_fields import LossFields


class LossSettings(LossFields):
    """Everything between the tokens of a batch and the number that is minimized."""

    @model_validator(mode="after")
    def _does_what_it_says(self) -> Self:
        if found := guards.problem(self):
            raise ValueError(found)
        return self

    @property
    def loss_parameters(self) -> dict[str, float]:
        """What the loss takes: its defaults, and what was given instead."""
        return self._resolved(LOSS_DEFAULTS[self.loss])

    @property
    def rho_parameters(self) -> dict[str, float]:
        return self._resolved(RHO_DEFAULTS[self.rho or "tis"])

    @property
    def mask_parameters(self) -> dict[str, float]:
        return self._resolved(MASK_DEFAULTS[self.sequence_mask])

    @property
    def tau(self) -> float:
        return DRIFT_DEFAULTS.get(self.loss, 0.0) if self.drift_tau is None else self.drift_tau

    @property
    def whole_trajectories(self) -> bool:
        """Whether all rows of a trajectory have to lie in one pack."""
        return self.loss == "gspo" or self.sequence_mask != "none"

    @property
    def needs_proximal(self) -> bool:
        """Whether p_t takes a forward pass; before the first optimiser step it equals c_t."""
        recompute = self.ratio == "decoupled" and self.proximal != "loglinear"
        return recompute and self.optimiser_steps > 1

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0

    def _resolved(self, defaults: Mapping[str, float]) -> dict[str, float]:
        given = {name: getattr(self, name) for name in defaults}
        return {name: defaults[name] if value is None else value for name, value in given.items()}
