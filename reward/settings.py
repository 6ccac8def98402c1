"""The settings of `steplog reward` and `steplog replay rescore`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from pool.connection import Connection
from pool.readers.selection import SelectionSettings
from pool.settings import ServiceSettings
from servicekit.process import check_address

Positive = Annotated[int, Field(gt=0)]


class ScoringSettings(Connection):
    """How trajectories are scored, live or again."""

    function: tuple[str, ...] = Field(
        (),
        description="reward functions: a built-in name, FILE.py:NAME or MODULE:NAME, each with "
        "?weight=… and parameters; without any, the rewards that agents give are used",
    )
    channels: tuple[str, ...] = Field(
        ("train", "val"),
        min_length=1,
        description="channels whose trajectories are scored; others stay in steps only",
    )
    tokenizer: str | None = Field(
        None, description="folder of the tokenizer; needed by functions that read text"
    )
    slot: str = Field(
        "0",
        description="this worker's name in its group: unique in it, and the same after a restart",
    )
    processes: Positive = Field(
        1, description="processes that run functions which are not asynchronous"
    )
    at_once: Positive = Field(2_000, description="maximum number of trajectories in progress")


class RewardSettings(ScoringSettings, ServiceSettings):
    into: str | None = Field(
        None,
        description="tag: write to a topic of rewards of its own; the tag also has its own consumer "
        "group, offsets and functions",
    )
    group: str | None = Field(
        None, description="consumer group (default: steplog-reward, with a tag steplog-reward-TAG)"
    )
    host: str = Field("127.0.0.1", description="address for /compute_reward, /ready and /metrics")
    port: int = Field(
        8200, ge=0, lt=65536, description="port for these routes; 0 takes any free one"
    )
    insecure: bool = Field(
        False, description="allow an address other than loopback, although requests need no key"
    )

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        danger = (
            "lets anybody who can reach it run the reward functions; "
            "give --insecure if only the gateway can reach it"
        )
        check_address(self.host, self.insecure, danger)
        return self


class RescoreSettings(ScoringSettings, SelectionSettings):
    function: tuple[str, ...] = Field(
        min_length=1,
        description="reward functions: a built-in name, FILE.py:NAME or MODULE:NAME, each with "
        "?weight=… and parameters",
    )
    into: str = Field(description="tag of the new topic of rewards")
