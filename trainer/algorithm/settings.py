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
    def _check_combination(self) -> Self:
        if problem := guards.find_problem(self):
            raise ValueError(problem)
        return self

    @property
    def loss_parameters(self) -> dict[str, float]:
        """The parameters of the loss: as set, or else its defaults."""
        return self._with_defaults(LOSS_DEFAULTS[self.loss])

    @property
    def rho_parameters(self) -> dict[str, float]:
        return self._with_defaults(RHO_DEFAULTS[self.rho or "tis"])

    @property
    def mask_parameters(self) -> dict[str, float]:
        return self._with_defaults(MASK_DEFAULTS[self.sequence_mask])

    @property
    def tau(self) -> float:
        return DRIFT_DEFAULTS.get(self.loss, 0.0) if self.drift_tau is None else self.drift_tau

    @property
    def whole_trajectories(self) -> bool:
        """Whether all rows of a trajectory have to lie in one pack."""
        return self.loss == "gspo" or self.sequence_mask != "none"

    @property
    def needs_proximal(self) -> bool:
        """Whether the proximal log-probs p_t need a forward pass of their own. With a single optimizer
        step they equal the current ones, c_t."""
        recompute = self.ratio == "decoupled" and self.proximal != "loglinear"
        return recompute and self.optimiser_steps > 1

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0

    def _with_defaults(self, defaults: Mapping[str, float]) -> dict[str, float]:
        values = {name: getattr(self, name) for name in defaults}
        return {name: defaults[name] if value is None else value for name, value in values.items()}
