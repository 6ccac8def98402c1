"""A run without a trainer: time that is set by hand, and steps that say what a test wants."""

from trainer.progress.run_status import StepReport


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


METRICS = {
    "reward_mean": 0.5,
    "reward_mean_all": 0.4,
    "loss": -0.0123,
    "grad_norm": 0.41,
    "entropy": 0.83,
    "age_mean": 1.3,
    "age_max": 4.0,
    "tokens": 1000.0,
    "tokens_per_second": 45210.0,
}


def step(version: int, *alarms: str, **metrics: float) -> StepReport:
    verdicts = {"train": 12 * version, "stale": version, "late": 0}
    told = METRICS | metrics
    return StepReport(version, version + 3, 2, told, {"training": 2.0}, verdicts, alarms)
