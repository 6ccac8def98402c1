"""What every environment can be told. An environment's own settings are fields of a subclass."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from servicekit.trackers import TrackerName

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
LONGEST = 5 * 24 * 3600
"""Seconds; the gateway takes no later deadline."""
LOGIN = re.compile(r"(?<=//)[^/@\s]+(?=@)")


class EnvironmentSettings(BaseModel):
    # Otherwise pydantic would show the whole input, key and all, when something does not fit.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    gateway: str = Field("http://127.0.0.1:8100", description="the gateway, for serve and evaluate")
    url: str | None = Field(
        None,
        description="any OpenAI-style URL, as http://HOST:PORT/v1, for process and evaluate; "
        "nothing is recorded then",
    )
    model: str = Field("default", description="the model's name at that URL")
    api_key: SecretStr | None = Field(None, description="key of the gateway, or of that URL")
    group_size: Positive = Field(8, description="rollouts of each item, which are compared")
    groups: Positive | None = Field(
        None, description="end after so many groups; by default serve goes on, process makes 8"
    )
    until_version: Positive | None = Field(
        None, description="serve ends when the engines have the weights of this version"
    )
    workers: Positive = Field(16, description="groups under way at the same time, at most")
    rollout_timeout_s: Seconds = Field(600, description="seconds that a rollout may take")
    attempts: Positive = Field(
        3, description="tries of a rollout whose gateway, model or service was away"
    )
    patience_s: Seconds = Field(300, description="seconds that the gateway may be away")
    drain_s: float = Field(30, ge=0, description="seconds that running groups get on SIGTERM")
    max_failures: Positive = Field(
        8, description="groups in a row without any usable rollout, after which it stops"
    )
    seed: int = Field(0, description="items are drawn from it")
    eval_every: int = Field(0, ge=0, description="evaluate after so many groups of serve; 0: never")
    eval_items: Positive = Field(64, description="items of an evaluation, at most")
    eval_samples: Positive = Field(1, description="rollouts of each of them")
    dir: Path | None = Field(
        None, description="where it keeps its place and its files (default: .steplog/NAME)"
    )
    keep: Positive = Field(32, description="newest groups on the HTML page of rollouts")
    jsonl: bool = Field(False, description="serve also appends every group to rollouts.jsonl")
    report_every_s: Seconds = Field(30, description="seconds between two rows of metrics")
    trackers: tuple[TrackerName, ...] = Field(
        (), description="where metrics go besides metrics.jsonl: wandb, tensorboard, trackio"
    )

    @field_validator("gateway", "url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("it must begin with http:// or https://")
        return url.rstrip("/") if url is not None else None

    @property
    def deadline_s(self) -> float:
        """After this a trajectory that nobody completed expires: all attempts, and some outages."""
        return min(LONGEST, self.attempts * self.rollout_timeout_s + 2 * self.patience_s)

    def shown(self) -> dict[str, Any]:
        """For others to see: secrets are stars, and URLs have no login."""
        given = self.model_dump(mode="json", exclude_none=True)
        return {
            name: LOGIN.sub("***", value) if isinstance(value, str) else value
            for name, value in given.items()
        }
