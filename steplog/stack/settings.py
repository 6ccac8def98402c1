"""The settings of the local stack. Its parts read their own settings from the same file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Service = Literal["gateway", "reward", "train"]


class StackSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Path | None = Field(None, description="settings file, which is passed to all parts")
    dir: Path = Field(
        Path(".steplog/stack"), description="folder of the stack's state and its log files"
    )
    bootstrap: str | None = Field(None, description="Kafka brokers, as HOST:PORT[,HOST:PORT…]")
    kafka: bool | None = Field(
        None, description="start the local broker (default: yes, unless bootstrap is set)"
    )
    services: tuple[Service, ...] = Field(
        ("gateway", "reward", "train"), description="services to start"
    )
    reward_workers: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="number of reward workers; slots count from 0, ports from the port of [reward]",
    )
    engine: tuple[str, ...] = Field(
        (),
        description="command lines of the engines, in the order of the gateway's engines, like `env "
        "VLLM_SERVER_DEV_MODE=1 vllm serve …`; in the file, a list",
    )
    wait_s: float = Field(600, gt=0, description="seconds in which everything must become ready")
    hang_s: float = Field(
        60,
        gt=0,
        description="seconds without an answer after which a running part is killed and restarted",
    )
    foreground: bool = Field(False, description="keep running, and stop the stack on Ctrl-C")
    json_: bool = Field(False, description="print the status as JSON")
