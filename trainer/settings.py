"""Settings of `steplog train` and `steplog export`: one flat model, composed of those of the parts."""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pool.readers.selection import SelectionSettings
from pool.settings import ServiceSettings
from pool.topics import rewarded_topic
from servicekit.process import check_address
from servicekit.settings_sources import option_flag
from servicekit.trackers import TrackerName
from trainer.algorithm.alarms import AlarmSettings
from trainer.algorithm.settings import LossSettings
from trainer.decisions.settings import DecisionSettings
from trainer.model.settings import ExecutionSettings, LearnerSettings
from trainer.weights.settings import WeightsSettings

Positive = Annotated[int, Field(gt=0)]


LIVE_ONLY = {
    "check_engines": "no engine gets the weights of an offline run",
    "group": "an offline run joins no consumer group",
    "waiting_groups": "an offline run does not read ahead of its current batch",
    "max_age": "age counts versions of this run only; select older data with --from-version",
    "stale_tokens": "age counts versions of this run only; select older data with --from-version",
    "accept_runs": "--of-run selects the runs, and all of them are accepted",
    "group_deadline_s": "groups that are incomplete at the end of the range are judged then",
}
"""Settings that have no meaning in an offline run, and why."""


class TrainSettings(
    ServiceSettings,
    SelectionSettings,
    DecisionSettings,
    LossSettings,
    LearnerSettings,
    ExecutionSettings,
    WeightsSettings,
    AlarmSettings,
):
    offline: bool = Field(
        False, description="train on a range of the log, without engines, and stop at its end"
    )
    run: str = Field("default", description="name of the training run; the same as in the gateway")
    model: Path = Field(description="Hugging Face folder of the model that the run starts from")
    group: str | None = Field(None, description="consumer group (default: steplog-trainer-RUN)")
    rewards: str | None = Field(
        None, description="tag of the rewards to train on (default: rewards without a tag)"
    )
    checkpoints: Path = Field(
        Path("checkpoints"), description="folder for checkpoints, with a subfolder per run"
    )
    checkpoint_every: Positive = Field(20, description="versions between two checkpoints")
    keep_checkpoints: Positive = Field(3, description="number of newest checkpoints to keep")
    keep_every: Positive | None = Field(
        None, description="also keep the checkpoint of every version that is a multiple of this"
    )
    versions: Positive | None = Field(
        None, description="stop when this version is live (default: never)"
    )
    seed: int = Field(0, ge=0, description="seed of everything random in training")
    threads: Positive | None = Field(
        None, description="CPU threads per process; weights are reproducible for the same number"
    )
    waiting_groups: Positive = Field(
        2_000, description="complete groups that may wait for a decision; above it, reading pauses"
    )
    accept_loss: bool = Field(
        False,
        description="continue even if Kafka has deleted records of decided groups, which become lost",
    )
    give_up: Positive | None = Field(
        None,
        description="make this version without its decided batch, which becomes given_up: for a batch "
        "whose training always fails",
    )
    check_engines: bool = Field(
        True, description="at start, compare log-probs computed by the engines and by the trainer"
    )
    trackers: tuple[TrackerName, ...] = Field(
        (), description="experiment trackers that also get the metrics"
    )
    tracker_dir: Path = Field(Path("progress"), description="folder for files that trackers write")
    host: str = Field("127.0.0.1", description="address for /health, /ready and /metrics")
    port: int = Field(
        8300,
        ge=0,
        lt=65536,
        description="port for /health, /ready and /metrics; 0 picks a free one",
    )
    insecure: bool = Field(
        False,
        description="allow a host that is not loopback; anyone who reaches it can read the metrics",
    )

    @property
    def topic(self) -> str:
        return rewarded_topic(self.rewards)

    @property
    def consumer_group(self) -> str:
        return self.group or f"steplog-trainer-{self.run}"

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        danger = "shows the metrics to anyone who can reach it; set --insecure to allow that"
        check_address(self.host, self.insecure, danger)
        return self

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        """Refuses settings that belong to the other mode, live or offline."""
        set_fields = self.model_fields_set
        if not self.offline:
            for name in SelectionSettings.model_fields.keys() & set_fields:
                raise ValueError(
                    f"{option_flag(name)} selects a range of the log; it needs --offline"
                )
            return self
        for name in (*WeightsSettings.model_fields, *LIVE_ONLY):
            if name in set_fields:
                reason = LIVE_ONLY.get(name, "no engine gets the weights of an offline run")
                raise ValueError(f"{option_flag(name)} cannot be used with --offline: {reason}")
        return self


class ExportSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field("default", description="name of the training run")
    checkpoints: Path = Field(Path("checkpoints"), description="folder of the checkpoints")
    version: int | None = Field(
        None, ge=0, description="version to export (default: the newest checkpoint)"
    )
    into: Path = Field(description="folder to write; it must be empty or not exist")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="data type of the exported weights"
    )


Section = TypeVar("Section", bound=BaseModel)


def section(settings: TrainSettings, model: type[Section]) -> Section:
    """The settings of one part of the trainer, as a model of its own."""
    return model.model_validate({name: getattr(settings, name) for name in model.model_fields})
