"""Settings of decisions: which groups are trained, and which get another verdict."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pool.core.groups import GroupRules

Positive = Annotated[int, Field(gt=0)]


class DecisionSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    channel: str = Field("train", description="channel whose trajectories are trained")
    groups_per_batch: Positive = Field(32, description="groups in one training step (B)")
    group_size: Positive = Field(
        8, description="trajectories in a group, where its Steps do not say"
    )
    quorum: float = Field(
        0.5, gt=0, le=1, description="share of a group that must be usable (q); 1 for strict GRPO"
    )
    group_deadline_s: float = Field(
        3600.0, gt=0, description="seconds after which a group is decided with the members it has"
    )
    max_age: int = Field(8, ge=0, description="largest age of a trained token, in versions (S_max)")
    stale_tokens: Literal["drop", "mask"] = Field(
        "drop",
        description="trajectories with tokens older than max_age: drop them, or mask those tokens and "
        "train the rest",
    )
    no_variance: Literal["refill", "shrink"] = Field(
        "refill",
        description="groups whose rewards are all equal: replace them in the batch by other groups "
        "(refill), or make the batch smaller (shrink)",
    )
    min_share_wait_s: float = Field(
        600.0,
        ge=0,
        description="seconds without a group after which an environment's minimum share is ignored; "
        "until then a batch waits for its groups",
    )
    accept_runs: tuple[str, ...] = Field(
        (), description="other runs whose trajectories may be trained, at any age"
    )

    def group_rules(self) -> GroupRules:
        return GroupRules(
            channel=self.channel,
            group_size=self.group_size,
            quorum=self.quorum,
            deadline=self.group_deadline_s,
        )
