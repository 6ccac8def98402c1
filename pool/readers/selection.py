"""Which part of the log a command reads: a range, and a filter on trajectories.

A range of offsets or times says where a trajectory must have ended. A range of policy versions says
which versions sampled it, according to the segments of its tokens. The marks only say where reading
may start, since nothing that a version generated lies before the mark at which it was opened.
"""

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pool.connection import Connection
from pool.core.marks import PolicyMarks, runs_of
from pool.core.trajectories import StrayRecord, Trajectory, step_of
from pool.readers.reader import PartitionBounds, TopicReader, open_topic, read_records
from pool.readers.scan import OffsetRange
from pool.topics import POLICY, STEPS
from schemas import PolicyVersion
from servicekit.errors import Fatal, OffsetLost

Point = int | datetime


class SelectionSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    from_: Point | None = Field(
        None,
        description="offset of every partition, or time like 2030-01-31T12:00:00Z, to start at",
    )
    until: Point | None = Field(None, description="offset or time to stop before")
    of_run: tuple[str, ...] = Field((), description="only trajectories of these runs")
    from_version: int | None = Field(
        None,
        ge=0,
        description="only trajectories sampled by this policy version or later; needs of_run",
    )
    to_version: int | None = Field(
        None,
        ge=0,
        description="only trajectories sampled by this policy version or earlier; needs of_run",
    )
    where: tuple[str, ...] = Field(
        (), description="only trajectories with this metadata, as KEY=VALUE or KEY.KEY=VALUE"
    )

    @field_validator("from_", "until", mode="before")
    @classmethod
    def _parse_point(cls, point: object) -> object:
        return parse_offset_or_time(point)

    @field_validator("where")
    @classmethod
    def _check_condition(cls, where: tuple[str, ...]) -> tuple[str, ...]:
        for condition in where:
            if "=" not in condition:
                raise ValueError(f"{condition!r} is not of the form KEY=VALUE")
        return where

    @model_validator(mode="after")
    def _check_versions(self) -> Self:
        first, last = self.from_version, self.to_version
        if (first is not None or last is not None) and len(self.of_run) != 1:
            raise ValueError("versions belong to one run: give of_run too, with one name")
        if first is not None and last is not None and first > last:
            raise ValueError(f"from_version {first} is greater than to_version {last}")
        return self


def parse_offset_or_time(point: object) -> object:
    """Parses text as an offset or a time; a time without a zone is UTC."""
    if not isinstance(point, str):
        return point
    if point.isdecimal():
        return int(point)
    try:
        time = datetime.fromisoformat(point)
    except ValueError:
        raise ValueError("it is neither an offset nor a time like 2030-01-31T12:00:00Z") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


class Selection:
    """The filter on trajectories. With `channel` None, those of all channels."""

    def __init__(self, settings: SelectionSettings, channel: str | None = None) -> None:
        self._channel = channel
        self._runs = frozenset(settings.of_run)
        self._versions = (settings.from_version, settings.to_version)
        self._where = [
            (key.split("."), value)
            for key, _, value in (condition.partition("=") for condition in settings.where)
        ]

    def matches(self, trajectory: Trajectory) -> bool:
        if self._channel is not None and trajectory.end.channel != self._channel:
            return False
        if self._runs and not runs_of(trajectory) <= self._runs:
            return False
        return self._has_versions(trajectory) and self._has_metadata(trajectory)

    def matches_item(self, item: Trajectory | StrayRecord) -> bool:
        """Stray records can only be filtered by their run and channel."""
        if isinstance(item, Trajectory):
            return self.matches(item)
        record = item.received.record
        if self._channel is not None and getattr(record, "channel", None) != self._channel:
            return False
        return not self._runs or getattr(record, "run", None) in self._runs

    def _has_versions(self, trajectory: Trajectory) -> bool:
        first, last = self._versions
        if first is None and last is None:
            return True
        if trajectory.is_scored:
            return False  # the version that sampled it is not known
        versions = [
            segment.version
            for received in trajectory.steps
            for segment in step_of(received).segments
        ]
        if not versions:
            return False
        return (first or 0) <= min(versions) and (last is None or max(versions) <= last)

    def _has_metadata(self, trajectory: Trajectory) -> bool:
        if not self._where:
            return True
        texts = [trajectory.end.metadata, *(step_of(r).metadata for r in trajectory.steps)]
        documents = [json.loads(text) for text in texts if text != "{}"]
        return all(
            any(_has_value_at(document, path, value) for document in documents)
            for path, value in self._where
        )


def _has_value_at(document: Any, path: list[str], value: str) -> bool:
    for key in path:
        if not isinstance(document, dict) or key not in document:
            return False
        document = document[key]
    return (document if isinstance(document, str) else json.dumps(document)) == value


class TopicRanges(NamedTuple):
    """The ranges of a topic that are selected, and the first offset that each partition still has."""

    by_partition: dict[int, OffsetRange]
    low: dict[int, int]

    def extended_back(self, back: int) -> dict[int, OffsetRange]:
        """The ranges, started `back` offsets earlier as far as the log has them."""
        return {
            number: OffsetRange(max(self.low[number], range_.first - back), range_.end)
            if range_.first < range_.end
            else range_
            for number, range_ in self.by_partition.items()
        }


def find_ranges(connection: Connection, topic: str, settings: SelectionSettings) -> TopicRanges:
    """The ranges to read. An empty or expired range, or a version that does not exist, is an error: it
    must be a mistake."""
    return asyncio.run(_find_ranges(connection, topic, settings))


async def _find_ranges(
    connection: Connection, topic: str, settings: SelectionSettings
) -> TopicRanges:
    name = connection.topic_name(topic)
    async with open_topic(connection, topic) as reader:
        bounds = await reader.bounds(reader.partitions)
        if all(bound.low == bound.end for bound in bounds.values()):
            raise Fatal(f"There is nothing to read: {name} is empty")
        first = await _offsets(reader, settings.from_, {n: b.low for n, b in bounds.items()})
        end = await _offsets(reader, settings.until, {n: b.end for n, b in bounds.items()})
    _check_kept(name, settings.from_, bounds)
    marks = await _version_marks(connection, topic, settings)
    ranges = {
        n: OffsetRange(max(first[n], marks.get(n, 0), bound.low), min(end[n], bound.end))
        for n, bound in bounds.items()
    }
    if all(range_.first >= range_.end for range_ in ranges.values()):
        held = ", ".join(f"{n}: {b.low}-{b.end}" for n, b in bounds.items())
        raise Fatal(f"The range selects nothing of {name}; its partitions have the offsets {held}")
    return TopicRanges(
        {
            n: OffsetRange(range_.first, max(range_.first, range_.end))
            for n, range_ in ranges.items()
        },
        {n: bound.low for n, bound in bounds.items()},
    )


async def _offsets(
    reader: TopicReader, point: Point | None, default: dict[int, int]
) -> dict[int, int]:
    if point is None:
        return default
    if isinstance(point, datetime):
        return await reader.offsets_at(point, reader.partitions)
    return dict.fromkeys(reader.partitions, point)


def _check_kept(name: str, start: Point | None, bounds: Mapping[int, PartitionBounds]) -> None:
    """Raises OffsetLost if the first offset was deleted. A time before the log's first record is no
    error: it means the log's beginning."""
    if not isinstance(start, int):
        return
    expired = {n: bound.low for n, bound in bounds.items() if start < bound.low}
    if start > 0 and expired:
        number, low = min(expired.items())
        raise OffsetLost(
            f"Offset {start} of partition {number} of {name} has expired; the partition begins at {low}"
        )


async def _version_marks(
    connection: Connection, topic: str, settings: SelectionSettings
) -> dict[int, int]:
    if settings.from_version is None and settings.to_version is None:
        return {}
    (run,) = settings.of_run
    policy = await read_records(connection, POLICY, connection.codec())
    marks = PolicyMarks(run, [record for record in policy if isinstance(record, PolicyVersion)])
    for version in (settings.from_version, settings.to_version):
        if version is not None and not marks.is_opened(version):
            newest = (
                "it has none" if marks.opened is None else f"the newest version is {marks.opened}"
            )
            raise Fatal(f"Version {version} of run {run} does not exist; {newest}")
    if settings.from_version is None:
        return {}
    steps, rewarded = marks.opened_at(settings.from_version)
    return dict(enumerate({STEPS: steps, marks.topic: rewarded}.get(topic, [])))
