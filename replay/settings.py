"""The settings of the `steplog replay` commands on the stored log."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pool.connection import Connection
from pool.core.groups import DEFAULT_RULES
from pool.readers.selection import SelectionSettings
from pool.topics import rewarded_topic
from replay.dataset.formats import FileFormat, RowKind

Positive = Annotated[int, Field(gt=0)]


class LineageSettings(Connection):
    trajectory: str = Field(description="trajectory_uid, or the group_uid of a posted group")
    prompt: str | None = Field(
        None, description="its prompt_uid, if known: then only one partition is searched"
    )
    run: str | None = Field(None, description="report on this training run only (default: on all)")
    json_: bool = Field(False, description="print one JSON document")


class DiffSettings(Connection, SelectionSettings):
    """Ranges are offsets of `steps`, from which both sets of rewards were made."""

    rewards: str | None = Field(
        None, description="tag of the first set of rewards (default: the rewards without a tag)"
    )
    with_: str = Field(description="tag of the set of rewards to compare it with")
    channel: str = Field(DEFAULT_RULES.channel, description="channel to compare")
    group_size: Positive = Field(
        DEFAULT_RULES.group_size, description="size of groups whose Steps do not give it"
    )
    quorum: float = Field(
        DEFAULT_RULES.quorum, gt=0, le=1, description="share of a group that must be usable"
    )
    limit: int = Field(
        10, ge=0, description="changed groups and trajectories to show, of each kind"
    )
    json_: bool = Field(False, description="print one JSON document")

    @model_validator(mode="after")
    def _check_tags_differ(self) -> Self:
        if self.rewards == self.with_:
            raise ValueError(f"rewards and with are both {self.with_}; give two different tags")
        return self


class DatasetExportSettings(SelectionSettings, Connection):
    """Which trajectories to export, and where to."""

    into: Path = Field(description="new folder, or a new file that ends in .parquet or .jsonl")
    format: FileFormat | None = Field(
        None, description="format of the files (default: from the ending of --into, else parquet)"
    )
    per: RowKind = Field("trajectory", description="what each row holds: a trajectory or a Step")
    topic: Literal["steps", "rewarded"] = Field(
        "rewarded", description="topic to read; steps has no rewards of reward functions"
    )
    rewards: str | None = Field(
        None, description="tag of the rewards (default: the rewards without a tag)"
    )
    channel: str | None = Field(None, description="export only this channel (default: all)")
    tokenizer: Path | None = Field(
        None, description="folder of the tokenizer; adds the columns prompt_text and response_text"
    )
    shard_mib: int = Field(
        512, ge=1, description="approximate size of each file in a folder, in MiB"
    )

    @property
    def read_from(self) -> str:
        return "steps" if self.topic == "steps" else rewarded_topic(self.rewards)

    @property
    def file_format(self) -> FileFormat:
        by_suffix: dict[str, FileFormat] = {".parquet": "parquet", ".jsonl": "jsonl"}
        return self.format or by_suffix.get(self.into.suffix, "parquet")

    @property
    def is_one_file(self) -> bool:
        return self.into.suffix == f".{self.file_format}"

    @model_validator(mode="after")
    def _check_topic_and_tag(self) -> Self:
        if self.topic == "steps" and self.rewards is not None:
            raise ValueError("steps has no tagged rewards; set either topic or rewards")
        return self


class ImportSettings(Connection):
    """Which files to import, and into which topic."""

    files: tuple[Path, ...] = Field(
        description="exported files, folders of them, or white-box dumps in JSON lines",
        json_schema_extra={"positional": True},
    )
    into_topic: Literal["steps", "rewarded"] = Field(
        "steps",
        description="steps, to score them again, or rewarded, with the files' rewards",
    )
    rewards: str | None = Field(None, description="tag, and so the topic, for the rewards")
    run: str | None = Field(
        None, description="run to which the Steps shall belong (default: the run in the files)"
    )
    channel: str = Field("train", description="channel of white-box dumps, which name none")
    dry_run: bool = Field(False, description="check the files and write nothing")

    @property
    def topic(self) -> str:
        return "steps" if self.into_topic == "steps" else rewarded_topic(self.rewards)

    @model_validator(mode="after")
    def _check_topic_and_tag(self) -> Self:
        if self.into_topic == "steps" and self.rewards is not None:
            raise ValueError("steps has no tagged rewards; set into_topic to rewarded")
        return self


class DeleteSettings(Connection):
    """What to delete, and the topic prefix of the copy without it."""

    trajectory: tuple[str, ...] = Field((), description="trajectory_uids to delete")
    tenant: str | None = Field(None, description="delete everything that this tenant's keys opened")
    of_run: str | None = Field(
        None, description="delete everything of this run, including its ledger"
    )
    into_prefix: str | None = Field(
        None, description="topic prefix of the copy without the deleted records"
    )
    dry_run: bool = Field(False, description="report what would be deleted and write nothing")
    and_delete_original: bool = Field(
        False, description="once the copy is verified, delete the original topics"
    )

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if not (self.trajectory or self.tenant or self.of_run):
            raise ValueError("nothing to delete: set trajectory, tenant or of_run")
        if not self.dry_run and not self.into_prefix:
            raise ValueError("set into_prefix, the topic prefix of the copy, or dry_run")
        if self.into_prefix == self.topic_prefix:
            raise ValueError("into_prefix must differ from topic_prefix")
        return self
