"""The definition of an offline run, fixed when it starts: which range it reads, with which settings.

The first Decision of the run has no groups and holds this definition: the range, partition by
partition, and the settings on which every later Decision depends. A restart therefore reads the same
range, however much the log has grown since.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel

from pool.connection import Connection
from pool.core.trajectories import MEMORY, StrayRecord, Trajectory, step_of
from pool.readers.dataset import Dataset
from pool.readers.reader import open_topic, read_records
from pool.readers.scan import OffsetRange
from pool.readers.selection import SelectionSettings, TopicRanges
from pool.topics import LEDGER, POLICY
from schemas import Decision, PartitionOffsets, PolicyVersion
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress
from servicekit.tokenizer import TokenizerFolder
from trainer.algorithm.settings import LossSettings
from trainer.decisions.settings import DecisionSettings
from trainer.settings import TrainSettings, section

OFFLINE = "offline"
"""Key of the definition in the settings of a Decision."""


@dataclass(frozen=True, slots=True)
class RunDefinition:
    settings: dict[str, Any]
    """Settings that a restart must not change."""
    spans: dict[int, OffsetRange]
    """Offsets by partition; a trajectory belongs to the run if it ended in them."""
    starts: dict[int, int]
    """Offsets where reading starts: earlier, since a trajectory may begin before the range."""

    @classmethod
    def create(cls, settings: TrainSettings, tokenizer: TokenizerFolder) -> Self:
        """Defines a new run. Scans the whole range before anything is written, so that data which
        cannot be trained are reported now and not after hours."""
        selection = section(settings, SelectionSettings)
        ranges, count = _scan_range(settings, selection, tokenizer)
        if not count:
            raise Fatal(
                f"no trajectory of channel {settings.channel} in the range matches the selection"
            )
        starts = {number: span.first for number, span in ranges.extended_back(MEMORY).items()}
        return cls(_fixed_settings(settings), ranges.by_partition, starts)

    @classmethod
    def decode(cls, decision: Decision | None) -> Self | None:
        """Reads the definition from a run's first Decision; None if the run is not an offline run."""
        if decision is None:
            return None
        fields = json.loads(decision.settings).get(OFFLINE)
        if fields is None:
            return None
        spans = {int(number): OffsetRange(*span) for number, span in fields["spans"].items()}
        starts = {int(number): start for number, start in fields["starts"].items()}
        return cls(fields["given"], spans, starts)

    def encode(self) -> str:
        """JSON for the field `settings` of the first Decision."""
        fields = {"given": self.settings, "spans": self.spans, "starts": self.starts}
        return json.dumps({OFFLINE: fields})

    def offsets(self) -> list[PartitionOffsets]:
        return [
            PartitionOffsets(partition=number, committed=start, rebuild=start)
            for number, start in self.starts.items()
        ]

    def check_settings(self, settings: TrainSettings) -> None:
        """Refuses to continue the run with other settings than it was started with."""
        for name, value in _fixed_settings(settings).items():
            original = self.settings.get(name, value)
            if original != value:
                raise Fatal(
                    f"run {settings.run} was started with {name.rstrip('_')}={_format(original)}, and "
                    f"now it is {_format(value)}; use the original value, or choose another name with "
                    "--run"
                )


def _fixed_settings(settings: TrainSettings) -> dict[str, Any]:
    models: tuple[type[BaseModel], ...] = (SelectionSettings, DecisionSettings, LossSettings)
    fields: dict[str, Any] = {"seed": settings.seed}
    for model in models:
        fields |= section(settings, model).model_dump(mode="json")
    return fields


def _format(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)


def _scan_range(
    settings: TrainSettings, selection: SelectionSettings, tokenizer: TokenizerFolder
) -> tuple[TopicRanges, int]:
    """The ranges read, and how many trajectories are selected. Refuses records of a newer schema and
    token ids of another tokenizer."""
    count = 0
    with (
        Dataset(settings, settings.topic, selection, settings.channel) as dataset,
        show_progress("scanning the range", dataset.scan.total) as advance,
    ):
        for item in dataset.items():
            if isinstance(item, StrayRecord):
                count += len(dataset.posted_trajectories(item))
            else:
                check_tokenizer(item, tokenizer)
                count += 1
            advance(dataset.scan.done)
    return dataset.ranges, count


def check_tokenizer(trajectory: Trajectory, tokenizer: TokenizerFolder) -> None:
    """Refuses token ids of another tokenizer than the model's. Steps that record none are accepted."""
    for recorded in {step_of(received).tokenizer for received in trajectory.steps} - {""}:
        tokenizer.check(recorded)


ExistingRun = RunDefinition | Literal["new", "live"]


def find_run(connection: Connection, run: str) -> ExistingRun:
    """Tells whether a run is new, live or offline, without writing anything."""
    return asyncio.run(_find_run(connection, run))


async def _find_run(connection: Connection, run: str) -> ExistingRun:
    codec = connection.codec()
    versions = await read_records(connection, POLICY, codec)
    if not any(isinstance(record, PolicyVersion) and record.run == run for record in versions):
        return "new"
    async with open_topic(connection, LEDGER) as reader:
        async for message in reader.read_all():
            record = codec.decode(message.value)
            if isinstance(record, Decision) and record.run == run:
                return RunDefinition.decode(record) or "live"
    return "live"


def check_not_offline(connection: Connection, run: str) -> None:
    """Refuses to train a run live that was trained offline."""
    if isinstance(find_run(connection, run), RunDefinition):
        raise Fatal(
            f"run {run} is an offline run; continue it with --offline, or choose another name with "
            "--run"
        )


def define_run(settings: TrainSettings, tokenizer: TokenizerFolder) -> RunDefinition:
    """The definition of an offline run, whether it is new or continued."""
    existing = find_run(settings, settings.run)
    if existing == "live":
        raise Fatal(
            f"run {settings.run} was trained live; choose another name for the offline run with --run"
        )
    if isinstance(existing, RunDefinition):
        existing.check_settings(settings)
        return existing
    return RunDefinition.create(settings, tokenizer)
