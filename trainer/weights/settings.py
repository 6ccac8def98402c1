"""Where the engines are, how weights get there, and how long each phase may take."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class WeightsSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: tuple[str, ...] = Field((), description="vLLM servers, as http://HOST:PORT")
    engines_file: Path | None = Field(
        None, description="file with one engine per line; it is read again when it changes"
    )
    weights_transport: Literal["gloo", "nccl"] = Field(
        "gloo", description="how weights travel: nccl between GPUs, gloo between CPUs"
    )
    weights_host: str = Field(
        "127.0.0.1", description="address of the trainer, as engines reach it"
    )
    weights_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="what weights are turned into on their way; none: as the trainer has them"
    )
    weights_buffer_bytes: int = Field(
        256 * 2**20, gt=0, description="parameters are sent together up to about this size"
    )
    weights_look_s: Seconds = Field(3, description="seconds an engine has to say what it has")
    weights_pause_s: Seconds = Field(30, description="seconds it has to pause")
    weights_join_s: Seconds = Field(
        60, description="seconds the process group has to come together"
    )
    weights_start_s: Seconds = Field(
        60, description="seconds an engine has to get ready for weights"
    )
    weights_update_s: Seconds = Field(300, description="seconds the transfer may take")
    weights_finish_s: Seconds = Field(
        120, description="seconds an engine has to put the weights to use"
    )
    weights_resume_s: Seconds = Field(30, description="seconds it has to go on")
    weights_grace_s: Seconds = Field(
        5,
        description="seconds that engines get to tell of a group's end, before they count as dead",
    )
    weights_retry_s: Seconds = Field(
        10, description="seconds until an engine that failed is tried again"
    )
