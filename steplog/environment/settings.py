"""The settings that all environments share. An environment's own settings are fields of a subclass."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from servicekit.trackers import TrackerName

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
LONGEST_DEADLINE_S = 5 * 24 * 3600
"""Seconds; the gateway accepts no later deadline."""


class EnvironmentSettings(BaseModel):
    # Otherwise pydantic's errors would show the whole input, including the API key.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    gateway: str = Field(
        "http://127.0.0.1:8100", description="URL of the gateway, for serve and evaluate"
    )
    url: str | None = Field(
        None,
        description="any OpenAI-style URL, such as http://HOST:PORT/v1, for process and evaluate; "
        "nothing is recorded in the log",
    )
    model: str = Field("default", description="name of the model at that URL")
    api_key: SecretStr | None = Field(None, description="API key of the gateway, or of that URL")
    judge_url: str | None = Field(
        None,
        description="OpenAI-style URL of a second model, for self.judge; its calls are not recorded",
    )
    judge_model: str = Field("default", description="name of the model at the judge's URL")
    judge_api_key: SecretStr | None = Field(None, description="API key of the judge's URL")
    group_size: Positive = Field(
        8, description="rollouts per item, which are compared with each other"
    )
    groups: Positive | None = Field(
        None,
        description="stop after this many groups (by default serve never stops, and process makes 8)",
    )
    until_version: Positive | None = Field(
        None, description="serve stops when the engines have the weights of this version"
    )
    weight: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="this environment's weight among all that serve the same run: groups in flight are "
        "divided by weight",
    )
    min_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="smallest share of every batch that comes from this environment"
    )
    workers: Positive = Field(16, description="largest number of groups that run at the same time")
    rollout_timeout_s: Seconds = Field(
        600, description="time limit of a rollout in seconds, at which it is truncated"
    )
    truncated_reward: float = Field(
        0.0,
        allow_inf_nan=False,
        description="reward of a rollout that was cut off by the model's context or the time limit "
        "before it had one, in an environment that gives rewards itself",
    )
    max_token_length: Positive | None = Field(
        None,
        description="largest number of tokens in a call, prompt and answer together; a rollout with a "
        "longer call fails and is not trained (default: no limit)",
    )
    attempts: Positive = Field(
        3,
        description="attempts at a rollout if the gateway, the model or a service it needs is down",
    )
    patience_s: Seconds = Field(300, description="seconds to wait for a gateway that is down")
    drain_s: float = Field(
        30, ge=0, description="seconds that running groups have to finish on SIGTERM"
    )
    max_failures: Positive = Field(
        8, description="stop after this many groups in a row without a usable rollout"
    )
    seed: int = Field(0, description="seed of the order of items")
    eval_every: int = Field(
        0, ge=0, description="serve runs an evaluation after every this many groups; 0: never"
    )
    eval_every_versions: int = Field(
        0,
        ge=0,
        description="serve runs an evaluation at its start and whenever the engines have got this "
        "many more versions of the weights; 0: never",
    )
    eval_items: Positive | None = Field(
        None, description="largest number of items in an evaluation (default: all of them)"
    )
    eval_one_version: bool = Field(
        False,
        description="repeat the items of an evaluation that older weights answered, until one version "
        "has answered all of them; it fails if the weights change in each of --attempts rounds",
    )
    eval_samples: Positive = Field(1, description="rollouts per item in an evaluation")
    dir: Path | None = Field(
        None, description="folder of its journal and results (default: .steplog/NAME)"
    )
    keep: Positive = Field(
        32, description="number of groups on the HTML page, which shows the newest"
    )
    jsonl: bool = Field(False, description="serve appends every group to rollouts.jsonl as well")
    report_every_s: Seconds = Field(30, description="seconds between rows of metrics")
    trackers: tuple[TrackerName, ...] = Field(
        (),
        description="trackers that get the metrics besides metrics.jsonl: wandb, tensorboard, "
        "trackio",
    )

    @field_validator("gateway", "url", "judge_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("it must start with http:// or https://")
        return url.rstrip("/") if url is not None else None

    @property
    def share(self) -> dict[str, dict[str, float]]:
        """What its trajectories are registered with, so that gateway and trainer know its share."""
        if (self.weight, self.min_share) == (1.0, 0.0):
            return {}
        return {"steplog_share": {"weight": self.weight, "minimum": self.min_share}}

    @property
    def deadline_s(self) -> float:
        """When a trajectory that nobody completed expires; leaves time for all attempts and some
        outages."""
        return min(LONGEST_DEADLINE_S, self.attempts * self.rollout_timeout_s + 2 * self.patience_s)
