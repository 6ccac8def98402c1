"""What is trained, and what is left: the settings of decisions."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pool.core.groups import GroupRules

Positive = Annotated[int, Field(gt=0)]


class DecidingSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    channel: str = Field("train", description="channel whose trajectories are trained")
    groups_per_batch: Positive = Field(32, description="groups of one training step (B)")
    group_size: Positive = Field(8, description="trajectories of a group whose Steps do not say it")
    quorum: float = Field(
        0.5, gt=0, le=1, description="share of a group that must be usable (q); 1 for strict GRPO"
    )
    group_deadline_s: float = Field(
        3600.0, gt=0, description="after this long a group is decided with the members that it has"
    )
    max_age: int = Field(
        8, ge=0, description="versions that the oldest trained token may be behind (S_max)"
    )
    stale_tokens: Literal["drop", "mask"] = Field(
        "drop",
        description="what is too old: drop the trajectory, or mask these tokens and train the rest",
    )
    no_variance: Literal["refill", "shrink"] = Field(
        "refill",
        description="groups whose rewards are all equal: others take their place in the batch "
        "(refill), or the batch is smaller (shrink)",
    )
    accept_runs: tuple[str, ...] = Field(
        (), description="other runs whose trajectories may be trained, at whatever age"
    )

    accept_scored: bool = Field(
        False,
        description="train groups that were posted through the Atropos API too, though nobody knows "
        "how old their weights were when they began",
    )

    def group_rules(self) -> GroupRules:
        return GroupRules(
            channel=self.channel,
            group_size=self.group_size,
            quorum=self.quorum,
            deadline=self.group_deadline_s,
        )
