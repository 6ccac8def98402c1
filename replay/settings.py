"""The settings of `steplog replay lineage` and `steplog replay diff`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from pool.connection import Connection
from pool.groups import DEFAULT_RULES
from pool.selection import SelectionSettings

Positive = Annotated[int, Field(gt=0)]


class LineageSettings(Connection):
    trajectory: str = Field(description="trajectory_uid to ask about")
    prompt: str | None = Field(
        None, description="its prompt_uid, if known: then one partition is searched, not all"
    )
    run: str | None = Field(None, description="tell of this training run only (default: of all)")
    json_: bool = Field(False, description="print all of it as one JSON document")


class DiffSettings(Connection, SelectionSettings):
    """Ranges are those of `steps`: both sets of rewards come from there."""

    rewards: str | None = Field(
        None, description="tag of the first rewards (default: those without a tag)"
    )
    with_: str = Field(description="tag of the rewards to compare them with")
    channel: str = Field(DEFAULT_RULES.channel, description="channel to look at")
    group_size: Positive = Field(
        DEFAULT_RULES.group_size, description="trajectories of a group whose Steps do not say it"
    )
    quorum: float = Field(
        DEFAULT_RULES.quorum, gt=0, le=1, description="share of a group that must be usable"
    )
    limit: int = Field(10, ge=0, description="groups and trajectories to show of each kind")
    json_: bool = Field(False, description="print one JSON document")

    @model_validator(mode="after")
    def _are_two(self) -> Self:
        if self.rewards == self.with_:
            raise ValueError(f"rewards and with are both {self.with_}, so nothing can differ")
        return self
