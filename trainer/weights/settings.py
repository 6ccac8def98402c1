"""Settings of the weight transfer: the engines, the transport, and a time limit per phase."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class WeightsSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: tuple[str, ...] = Field((), description="vLLM servers, as http://HOST:PORT")
    engines_file: Path | None = Field(
        None, description="file with one engine URL per line; it is read again before each use"
    )
    weights_transport: Literal["gloo", "nccl"] = Field(
        "gloo", description="how weights are sent: nccl between GPUs, gloo between CPUs"
    )
    weights_host: str = Field("127.0.0.1", description="address at which engines reach the trainer")
    weights_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="data type in which weights are sent (default: the trainer's)"
    )
    weights_buffer_bytes: int = Field(
        256 * 2**20,
        gt=0,
        description="approximate size of the buffers in which parameters are sent",
    )
    keep_kv: bool = Field(
        False,
        description="keep the engines' KV cache over weight updates: conversations are not computed "
        "again, but their tokens are sampled from keys and values of older weights",
    )
    weights_look_s: Seconds = Field(3, description="seconds for an engine to report its state")
    weights_pause_s: Seconds = Field(30, description="seconds for an engine to pause")
    weights_join_s: Seconds = Field(
        60, description="seconds for all members to join the process group"
    )
    weights_start_s: Seconds = Field(
        60, description="seconds for an engine to prepare for an update"
    )
    weights_update_s: Seconds = Field(300, description="seconds for the transfer")
    weights_finish_s: Seconds = Field(
        120, description="seconds for an engine to load the received weights"
    )
    weights_resume_s: Seconds = Field(30, description="seconds for an engine to resume")
    weights_grace_s: Seconds = Field(
        5,
        description="extra seconds for an engine to report that the process group failed",
    )
    weights_retry_s: Seconds = Field(
        10, description="seconds until an engine that failed is tried again"
    )
