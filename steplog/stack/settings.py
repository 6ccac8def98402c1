"""The settings of the local stack; every part has its own in the same file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Service = Literal["gateway", "reward", "train"]


class StackSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Path | None = Field(None, description="settings file, which all parts read")
    dir: Path = Field(Path(".steplog/stack"), description="what runs, and one log file per part")
    bootstrap: str | None = Field(None, description="Kafka brokers, as HOST:PORT[,HOST:PORT…]")
    kafka: bool | None = Field(
        None, description="start the local broker; by default, unless bootstrap is given"
    )
    services: tuple[Service, ...] = Field(
        ("gateway", "reward", "train"), description="services that are started"
    )
    reward_workers: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="reward workers, in slots from 0 and on ports from the reward's own"
    )
    engine: tuple[str, ...] = Field(
        (),
        description="command lines of the engines in the order of the gateway's URLs, like `env "
        "VLLM_SERVER_DEV_MODE=1 vllm serve …`; in the file, a list",
    )
    wait_s: float = Field(600, gt=0, description="seconds that everything has to get ready")
    hang_s: float = Field(
        60,
        gt=0,
        description="seconds of silence after which a part that runs is killed and started again",
    )
    foreground: bool = Field(False, description="stay, and take it down on Ctrl-C")
    json_: bool = Field(False, description="print the status as JSON")
