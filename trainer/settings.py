"""The trainer's settings: one flat table, put together from those of its parts."""

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
from trainer.deciding.settings import DecidingSettings
from trainer.model.settings import LearnerSettings
from trainer.weights.settings import WeightsSettings

Positive = Annotated[int, Field(gt=0)]


LIVE_ONLY = {
    "check_engines": "no engine gets the weights of an offline run",
    "group": "an offline run joins no consumer group",
    "waiting_groups": "an offline run reads no further than the batch that it makes",
    "max_age": "age counts versions of the run itself; choose older runs' with --from-version",
    "stale_tokens": "age counts versions of the run itself; choose older runs' with --from-version",
    "accept_runs": "--of-run chooses the runs, and all of them are accepted",
    "group_deadline_s": "a group that is incomplete when the range ends is judged as it is then",
}
"""Settings that mean nothing offline, and why."""


class TrainSettings(
    ServiceSettings,
    SelectionSettings,
    DecidingSettings,
    LossSettings,
    LearnerSettings,
    WeightsSettings,
    AlarmSettings,
):
    offline: bool = Field(
        False, description="train a range of the log, without engines, and end where it ends"
    )
    run: str = Field("default", description="name of the training run; gateways have the same")
    model: Path = Field(description="Hugging Face folder of the model that the run starts from")
    group: str | None = Field(None, description="consumer group (default: steplog-trainer-RUN)")
    rewards: str | None = Field(
        None, description="tag of the rewards to train on (default: those without a tag)"
    )
    checkpoints: Path = Field(Path("checkpoints"), description="folder for checkpoints, per run")
    checkpoint_every: Positive = Field(20, description="versions between two checkpoints")
    keep_checkpoints: Positive = Field(3, description="newest checkpoints that are kept")
    keep_every: Positive | None = Field(
        None, description="checkpoints of versions that are a multiple of it are kept for good"
    )
    versions: Positive | None = Field(
        None, description="stop when this version is live (default: go on for ever)"
    )
    seed: int = Field(0, ge=0, description="of whatever is random in training")
    threads: Positive | None = Field(
        None, description="threads of one process on CPUs; the same number gives the same weights"
    )
    waiting_groups: Positive = Field(
        2_000, description="complete groups that wait for a decision; then reading pauses"
    )
    accept_loss: bool = Field(
        False, description="go on although the log has deleted decided records; they become lost"
    )
    check_engines: bool = Field(
        True, description="compare the log-probs of engines with ours when the trainer starts"
    )
    trackers: tuple[TrackerName, ...] = Field(
        (), description="where to keep metrics besides Prometheus"
    )
    tracker_dir: Path = Field(Path("progress"), description="folder of what trackers write")
    host: str = Field("127.0.0.1", description="address for /health, /ready and /metrics")
    port: int = Field(8300, ge=0, lt=65536, description="port for them; 0 takes any free one")
    insecure: bool = Field(False, description="let anybody who reaches another address read them")

    @property
    def topic(self) -> str:
        return rewarded_topic(self.rewards)

    @property
    def consumer_group(self) -> str:
        return self.group or f"steplog-trainer-{self.run}"

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        danger = "shows the metrics to anybody who reaches it; give --insecure where that is meant"
        check_address(self.host, self.insecure, danger)
        return self

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> Self:
        """A live run reads what comes; an offline run has a range, and nobody waits for its weights."""
        given = self.model_fields_set
        if not self.offline:
            for name in SelectionSettings.model_fields.keys() & given:
                raise ValueError(
                    f"{option_flag(name)} chooses a range of the log: give --offline too"
                )
            return self
        for name in (*WeightsSettings.model_fields, *LIVE_ONLY):
            if name in given:
                reason = LIVE_ONLY.get(name, "no engine gets the weights of an offline run")
                raise ValueError(f"{option_flag(name)} and --offline exclude each other: {reason}")
        return self


class ExportSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field("default", description="name of the training run")
    checkpoints: Path = Field(Path("checkpoints"), description="folder of the checkpoints")
    version: int | None = Field(None, ge=0, description="which one (default: the newest)")
    into: Path = Field(description="folder that is made; it must be empty or not there")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="of the weights that are written"
    )


Part = TypeVar("Part", bound=BaseModel)


def part(settings: TrainSettings, kind: type[Part]) -> Part:
    """The settings of one part, apart from the others."""
    return kind.model_validate({name: getattr(settings, name) for name in kind.model_fields})
