"""The settings of `steplog replay step`."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from pool.connection import Connection

Positive = Annotated[int, Field(gt=0)]


class ReplayStepSettings(Connection):
    run: str = Field("default", description="name of the training run")
    version: Positive = Field(description="the version whose making is shown again")
    checkpoints: Path | None = Field(
        None, description="folder of checkpoints: trains the version again, from the one before it"
    )
    model: Path | None = Field(
        None,
        description="Hugging Face folder that the run started from (default: the one that the "
        "checkpoint names); alone, it trains all versions again",
    )
    threads: Positive | None = Field(
        None, description="threads of the CPU (default: as many as the run had)"
    )
    tolerance: float = Field(
        1e-3,
        ge=0,
        description="largest relative difference of a metric, where the machine is another one "
        "than the run's; on the same, every bit counts",
    )
    into: Path | None = Field(
        None, description="writes the weights, as a Hugging Face folder that is made"
    )
    json_: bool = Field(False, description="print all of it as one JSON document")

    @property
    def trains(self) -> bool:
        return self.checkpoints is not None or self.model is not None

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if self.into is not None and not self.trains:
            raise ValueError("into takes weights: give checkpoints or model too")
        return self
