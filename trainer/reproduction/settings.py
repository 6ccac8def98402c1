"""The settings of `steplog replay step`."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from pool.connection import Connection

Positive = Annotated[int, Field(gt=0)]


class ReplayStepSettings(Connection):
    run: str = Field("default", description="name of the training run")
    version: Positive = Field(description="the version to show or reproduce")
    checkpoints: Path | None = Field(
        None,
        description="folder of checkpoints: train the version again, from the newest one before it",
    )
    model: Path | None = Field(
        None,
        description="Hugging Face folder that the run started from (default: as in the checkpoint); "
        "without checkpoints, train all versions again from there",
    )
    threads: Positive | None = Field(None, description="CPU threads (default: as in the run)")
    tolerance: float = Field(
        1e-3,
        ge=0,
        description="largest relative difference of a metric on another machine than the run's; on the "
        "same machine, results must be equal bit for bit",
    )
    into: Path | None = Field(None, description="write the weights to this new Hugging Face folder")
    json_: bool = Field(False, description="print the report as one JSON document")

    @property
    def trains(self) -> bool:
        """Whether the version is trained again, and not only shown."""
        return self.checkpoints is not None or self.model is not None

    @model_validator(mode="after")
    def _check_into(self) -> Self:
        if self.into is not None and not self.trains:
            raise ValueError("into needs weights to write; set checkpoints or model too")
        return self
