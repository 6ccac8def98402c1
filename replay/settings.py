"""What the commands over the stored log take."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pool.connection import Connection
from pool.core.groups import DEFAULT_RULES
from pool.readers.selection import SelectionSettings
from pool.topics import rewarded_topic

Positive = Annotated[int, Field(gt=0)]


class LineageSettings(Connection):
    trajectory: str = Field(
        description="trajectory_uid to ask about, or the group_uid of a group that was posted"
    )
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


Format = Literal["parquet", "jsonl"]


class ExportSettings(SelectionSettings, Connection):
    """Which trajectories, and where to."""

    into: Path = Field(description="new folder, or one new file that ends in .parquet or .jsonl")
    format: Format | None = Field(
        None, description="of a folder's files (default: what --into ends in, else parquet)"
    )
    per: Literal["trajectory", "step"] = Field("trajectory", description="what a row is")
    topic: Literal["steps", "rewarded"] = Field(
        "rewarded", description="where to read: steps has no rewards of reward functions"
    )
    rewards: str | None = Field(None, description="tag of the rewards (default: those without one)")
    channel: str | None = Field(None, description="only this channel (default: all)")
    tokenizer: Path | None = Field(
        None, description="folder of the tokenizer: adds prompt_text and response_text"
    )
    shard_mib: int = Field(512, ge=1, description="size of a folder's files, about, in MiB")

    @property
    def read_from(self) -> str:
        return "steps" if self.topic == "steps" else rewarded_topic(self.rewards)

    @property
    def file_format(self) -> Format:
        named: dict[str, Format] = {".parquet": "parquet", ".jsonl": "jsonl"}
        return self.format or named.get(self.into.suffix, "parquet")

    @property
    def is_one_file(self) -> bool:
        return self.into.suffix == f".{self.file_format}"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.topic == "steps" and self.rewards is not None:
            raise ValueError("steps has no rewards with a tag: give topic or rewards")
        return self


class ImportSettings(Connection):
    """Which files, and into what."""

    files: tuple[Path, ...] = Field(
        description="exported files, folders of them, or white-box dumps in JSON lines",
        json_schema_extra={"positional": True},
    )
    into_topic: Literal["steps", "rewarded"] = Field(
        "steps", description="steps, to be scored again, or rewarded, with the rewards of the files"
    )
    rewards: str | None = Field(None, description="tag for the rewards: a topic of their own")
    run: str | None = Field(
        None, description="run that the Steps shall belong to (default: as the files say)"
    )
    channel: str = Field("train", description="of white-box dumps, which name none")
    dry_run: bool = Field(False, description="check the files, and write nothing")

    @property
    def topic(self) -> str:
        return "steps" if self.into_topic == "steps" else rewarded_topic(self.rewards)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.into_topic == "steps" and self.rewards is not None:
            raise ValueError("steps has no rewards with a tag: give into_topic rewarded")
        return self


class DeleteSettings(Connection):
    """What must go, and what the log without it is called."""

    trajectory: tuple[str, ...] = Field((), description="trajectory_uids to delete")
    tenant: str | None = Field(None, description="delete all that this tenant's keys opened")
    of_run: str | None = Field(None, description="delete all of this run, its ledger included")
    into_prefix: str | None = Field(
        None, description="topic prefix of the copy that goes on without them"
    )
    dry_run: bool = Field(False, description="say what would go, and write nothing")
    and_delete_original: bool = Field(
        False, description="once the copy is proven, delete the topics that it was made of"
    )

    @model_validator(mode="after")
    def _says_what(self) -> Self:
        if not (self.trajectory or self.tenant or self.of_run):
            raise ValueError("say what to delete: trajectory, tenant or of_run")
        if not self.dry_run and not self.into_prefix:
            raise ValueError("say where the rest goes: into_prefix, or dry_run")
        if self.into_prefix == self.topic_prefix:
            raise ValueError("into_prefix must be another one than topic_prefix")
        return self
