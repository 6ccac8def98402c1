"""What an offline run is about, fixed when it begins.

Its first Decision has no groups: it says the range, partition by partition, and the settings on which
every later Decision depends. So a restart reads the same range, however the log has grown.
"""

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel

from pool.connection import Connection
from pool.core.trajectories import MEMORY, Trajectory, step_of
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
from trainer.deciding.settings import DecidingSettings
from trainer.settings import TrainSettings, part

OFFLINE = "offline"
"""Where the settings of a Decision have it."""


@dataclass(frozen=True, slots=True)
class Beginning:
    given: dict[str, Any]
    spans: dict[int, OffsetRange]
    """In which the trajectories have ended."""
    starts: dict[int, int]
    """Where reading begins: a trajectory may have begun before."""

    @classmethod
    def find(cls, settings: TrainSettings, tokenizer: TokenizerFolder) -> Self:
        """Of a new run. The whole range is looked over before anything is written: what cannot be
        trained there is told now, not after hours."""
        selection = part(settings, SelectionSettings)
        ranges, count = _look_over(settings, selection, tokenizer)
        if not count and not settings.accept_scored:
            raise Fatal(
                f"the range holds no trajectory of channel {settings.channel} that is selected"
            )
        starts = {number: span.first for number, span in ranges.extended_back(MEMORY).items()}
        return cls(_given(settings), ranges.spans, starts)

    @classmethod
    def of(cls, decision: Decision | None) -> Self | None:
        """As a run's first Decision has it; None: it is none of an offline run."""
        if decision is None:
            return None
        told = json.loads(decision.settings).get(OFFLINE)
        if told is None:
            return None
        spans = {int(number): OffsetRange(*span) for number, span in told["spans"].items()}
        starts = {int(number): start for number, start in told["starts"].items()}
        return cls(told["given"], spans, starts)

    def text(self) -> str:
        return json.dumps({OFFLINE: asdict(self)})

    def offsets(self) -> list[PartitionOffsets]:
        return [
            PartitionOffsets(partition=number, committed=start, rebuild=start)
            for number, start in self.starts.items()
        ]

    def demand(self, settings: TrainSettings) -> None:
        """Refuses to go on with other settings than those that it began with."""
        for name, value in _given(settings).items():
            began = self.given.get(name, value)
            if began != value:
                raise Fatal(
                    f"run {settings.run} began with {name.rstrip('_')}={_shown(began)}, and this is "
                    f"{_shown(value)}; go on as it began, or give the run another name"
                )


def _given(settings: TrainSettings) -> dict[str, Any]:
    kinds: tuple[type[BaseModel], ...] = (SelectionSettings, DecidingSettings, LossSettings)
    found: dict[str, Any] = {"seed": settings.seed}
    for kind in kinds:
        found |= part(settings, kind).model_dump(mode="json")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)


def _look_over(
    settings: TrainSettings, selection: SelectionSettings, tokenizer: TokenizerFolder
) -> tuple[TopicRanges, int]:
    """What was read, and how many trajectories are selected; refuses records of a later version and
    foreign ids."""
    count = 0
    with (
        Dataset(settings, settings.topic, selection, settings.channel) as dataset,
        show_progress("looking over", dataset.scan.total) as moved,
    ):
        for trajectory in dataset:
            check_ids(trajectory, tokenizer)
            count += 1
            moved(dataset.scan.done)
    return dataset.ranges, count


def check_ids(trajectory: Trajectory, tokenizer: TokenizerFolder) -> None:
    """Refuses ids of another tokenizer than the model's; Steps that do not say theirs pass."""
    for recorded in {step_of(received).tokenizer for received in trajectory.steps} - {""}:
        tokenizer.check(recorded)


Run = Beginning | Literal["new", "live"]


def look(connection: Connection, run: str) -> Run:
    """What a run is, before anything of it is touched."""
    return asyncio.run(_look(connection, run))


async def _look(connection: Connection, run: str) -> Run:
    codec = connection.codec()
    versions = await read_records(connection, POLICY, codec)
    if not any(isinstance(record, PolicyVersion) and record.run == run for record in versions):
        return "new"
    async with open_topic(connection, LEDGER) as reader:
        async for message in reader.read_all():
            record = codec.decode(message.value)
            if isinstance(record, Decision) and record.run == run:
                return Beginning.of(record) or "live"
    return "live"


def check_live(connection: Connection, run: str) -> None:
    """Refuses to train a run live that was trained offline."""
    if isinstance(look(connection, run), Beginning):
        raise Fatal(
            f"run {run} is trained offline; go on with --offline, or give this one another name"
        )


def begin(settings: TrainSettings, tokenizer: TokenizerFolder) -> Beginning:
    """Of a run that is trained offline, whether it is new or goes on."""
    found = look(settings, settings.run)
    if found == "live":
        raise Fatal(
            f"run {settings.run} was trained live; give the offline run a name of its own with --run"
        )
    if isinstance(found, Beginning):
        found.demand(settings)
        return found
    return Beginning.find(settings, tokenizer)
