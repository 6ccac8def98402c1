"""The demo's settings."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class DemoSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: Path = Field(
        Path(".steplog/demo"), description="folder of the demo: settings, log, checkpoints"
    )
    resume: bool = Field(False, description="continue the last run instead of deleting it")
    versions: int = Field(24, ge=4, description="number of weight versions to train")
    learning_rate: float = Field(
        2e-3,
        ge=0,
        description="learning rate; with 0 the model learns nothing, and the demo says so",
    )
    keep: bool = Field(False, description="leave everything running at the end")
    limit_s: float = Field(1800, gt=0, description="give up after this many seconds")
