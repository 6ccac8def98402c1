"""The demo's settings."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class DemoSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: Path = Field(Path(".steplog/demo"), description="everything that the demo leaves behind")
    resume: bool = Field(False, description="go on with the last run; by default it is deleted")
    versions: int = Field(24, ge=4, description="versions to train")
    learning_rate: float = Field(2e-3, ge=0, description="at 0 nothing is learned, and it says so")
    keep: bool = Field(False, description="leave everything running at the end")
    limit_s: float = Field(1800, gt=0, description="give up after so many seconds")
