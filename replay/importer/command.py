"""`steplog replay import`: appends exported trajectories, or a white-box dump, to a log.

All files are checked before anything is written. Then complete trajectories are written, many per
transaction. A trajectory whose End is in the topic already is left out, so files may be imported twice,
and an import that was killed is simply repeated.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from pool import topics
from pool.connection import MAX_RECORD_BYTES, Connection
from pool.consumers.transaction import Transactions
from pool.producers.output import Output
from pool.readers.end_offsets import wait_until_readable
from pool.readers.reader import read_records
from pool.readers.scan import Scan
from pool.topics import POLICY
from replay.dataset.rows import TrajectoryRow
from replay.importer.files import ImportFiles, ReadTrajectory
from replay.importer.records import BadRow, records_of
from replay.offset_ranges import stored_ranges
from replay.settings import ImportSettings
from schemas import Codec, PolicyVersion, SchemaError, TrajectoryEnd
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress

ORIGIN_HEADER = "steplog.imported_from"
CHUNK_RECORDS = 2_000
CHUNK_BYTES = 8 * 1024 * 1024
"""Approximate size of a transaction: it must end long before it times out."""
TRANSACTION_TIMEOUT_S = 60.0


def import_files(settings: ImportSettings) -> str:
    """Writes the trajectories; returns a summary."""
    files = ImportFiles(settings.files, settings.run, settings.channel)
    topics.check(settings)
    importer = Importer(settings)
    steps, skipped = importer.check(files)
    if settings.dry_run:
        return f"{steps:,} Steps can be imported"
    if settings.rewards is not None:
        topics.create_rewarded_topic(settings, settings.rewards)
    summary = importer.write(files, steps)
    if skipped:
        summary += f"; {skipped:,} trajectories were invalid, or posted by an environment: left out"
    return summary


class Importer:
    """Checks the trajectories of files, then writes them."""

    def __init__(self, settings: ImportSettings) -> None:
        self._settings = settings
        self._codec = settings.codec()
        self._topic = settings.topic_name(settings.topic)
        self._trained_runs = asyncio.run(_trained_runs(settings, self._codec))
        self._present = UidSet()
        """Trajectories that the topic has."""

    def check(self, files: ImportFiles) -> tuple[int, int]:
        """Returns the number of Steps to write, and of trajectories to leave out."""
        steps = skipped = 0
        for read in files:
            row, step_rows = read.trajectory
            if _is_left_out(row):
                skipped += 1
                continue
            self._check_run(read.location, row.run)
            self._outputs(read)
            steps += len(step_rows)
        if not steps:
            paths = ", ".join(map(str, files.paths))
            raise Fatal(f"There are no Steps in {paths} that can be imported.")
        return steps, skipped

    def _check_run(self, location: str, run: str) -> None:
        if self._settings.run is None and run in self._trained_runs:
            raise Fatal(
                f"{location} belongs to run {run}, which is trained in this log: its trainer would "
                "take the Steps for its own. Give them another run with --run."
            )

    def _read_present(self) -> None:
        spans = stored_ranges(self._settings, self._settings.topic)
        with Scan(self._settings, self._settings.topic, spans) as scan:
            for message in scan:
                value = message.value()
                if value is not None and _is_end(self._codec, value):
                    end = self._codec.decode(value)
                    assert isinstance(end, TrajectoryEnd)
                    self._present.add(end.trajectory_uid)

    def write(self, files: ImportFiles, steps: int) -> str:
        counts = ImportCounts()
        transactions = Transactions(
            self._settings,
            group="",
            transactional_id=f"{self._topic}-import",
            patience=TRANSACTION_TIMEOUT_S,
            probe=lambda stage: None,
        )
        self._read_present()  # creating the transactions has ended those of an earlier import
        with show_progress("importing", steps) as update:
            for chunk in _chunks(self._new(files, counts)):
                transactions.write(chunk)
                update(counts.steps + counts.present_steps)
        wait_until_readable(self._settings, self._settings.topic)
        summary = f"{counts.trajectories:,} trajectories, {counts.steps:,} Steps in {self._topic}"
        if counts.present_steps:
            summary += f"; {counts.present_steps:,} Steps were there already"
        return summary

    def _new(self, files: ImportFiles, counts: "ImportCounts") -> Iterator[list[Output]]:
        """The outputs of each trajectory that the topic lacks."""
        for read in files:
            row, steps = read.trajectory
            if _is_left_out(row):
                continue
            if row.trajectory_uid in self._present:
                counts.present_steps += len(steps)
                continue
            self._present.add(row.trajectory_uid)
            counts.trajectories += 1
            counts.steps += len(steps)
            yield self._outputs(read)

    def _outputs(self, read: ReadTrajectory) -> list[Output]:
        row = read.trajectory.trajectory
        headers = [(ORIGIN_HEADER, _origin(read.location, row).encode())]
        try:
            records = records_of(read.trajectory, self._settings.run)
            values = [self._codec.encode(record, self._topic) for record in records]
        except (BadRow, SchemaError) as error:
            raise Fatal(f"{read.location} cannot be imported: {error}") from error
        if max(map(len, values)) > MAX_RECORD_BYTES:
            raise Fatal(
                f"{read.location} cannot be imported: a record of trajectory {row.trajectory_uid} is "
                f"larger than {MAX_RECORD_BYTES:,} bytes"
            )
        return [Output(self._topic, row.prompt_uid, value, headers) for value in values]


def _is_left_out(row: TrajectoryRow) -> bool:
    """Invalid trajectories, and posted ones: which weights sampled those is unknown, but Steps would
    claim to know it."""
    return row.problem is not None or row.posted


class ImportCounts:
    trajectories = 0
    steps = 0
    present_steps = 0
    """Steps of trajectories that the topic had already."""


def _origin(location: str, row: TrajectoryRow) -> str:
    if not row.topic:
        return location.rpartition("/")[2]
    return f"{row.topic}[{row.partition}]@{row.offset} {row.schema}"


def _chunks(trajectories: Iterable[list[Output]]) -> Iterator[list[Output]]:
    chunk: list[Output] = []
    size = 0
    for outputs in trajectories:
        chunk += outputs
        size += sum(len(output.value or b"") for output in outputs)
        if len(chunk) >= CHUNK_RECORDS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class UidSet:
    """A set of trajectory_uids in eight bytes each: their sorted hashes."""

    MAX_RECENT = 100_000

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.uint64)
        self._recent: set[int] = set()

    def add(self, uid: str) -> None:
        self._recent.add(_hash(uid))
        if len(self._recent) >= self.MAX_RECENT:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.union1d(self._sorted, recent)
            self._recent = set()

    def __contains__(self, uid: str) -> bool:
        key = _hash(uid)
        if key in self._recent:
            return True
        index = int(np.searchsorted(self._sorted, np.uint64(key)))
        return index < len(self._sorted) and int(self._sorted[index]) == key


def _hash(uid: str) -> int:
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little")


def _is_end(codec: Codec, value: bytes) -> bool:
    try:
        return codec.type_of(value) is TrajectoryEnd
    except SchemaError:
        return False


async def _trained_runs(connection: Connection, codec: Codec) -> set[str]:
    """Runs of which a trainer has opened a version."""
    records = await read_records(connection, POLICY, codec)
    return {record.run for record in records if isinstance(record, PolicyVersion)}
