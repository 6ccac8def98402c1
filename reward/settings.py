"""The settings of `steplog reward` and `steplog replay rescore`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from pool.connection import Connection
from pool.readers.selection import SelectionSettings
from pool.settings import ServiceSettings
from servicekit.process import check_address

Positive = Annotated[int, Field(gt=0)]


class ScoringSettings(Connection):
    """How trajectories are scored, now or again."""

    function: tuple[str, ...] = Field(
        (),
        description="reward functions: a built-in name, FILE.py:NAME or MODULE:NAME, each with "
        "?weight=… and parameters; without any, what agents said is taken over",
    )
    tokenizer: str | None = Field(
        None, description="folder of the tokenizer; needed by functions that look at text"
    )
    slot: str = Field(
        "0", description="this worker's name in its group; another one for each, kept over restarts"
    )
    processes: Positive = Field(
        1, description="processes that run functions which are not asynchronous"
    )
    at_once: Positive = Field(2_000, description="trajectories in hand at the same time")


class RewardSettings(ScoringSettings, ServiceSettings):
    into: str | None = Field(
        None,
        description="tag of a topic of rewards of its own, beside the others; this worker's group, "
        "place in the log and functions are the tag's",
    )
    group: str | None = Field(
        None, description="consumer group (default: steplog-reward, with a tag steplog-reward-TAG)"
    )
    host: str = Field("127.0.0.1", description="address for /compute_reward, /ready and /metrics")
    port: int = Field(8200, ge=0, lt=65536, description="port for them; 0 takes any free one")
    insecure: bool = Field(False, description="let anybody who reaches another host's address ask")

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        danger = (
            "lets anybody who reaches it run the reward functions; "
            "give --insecure where only the gateway can reach it"
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
