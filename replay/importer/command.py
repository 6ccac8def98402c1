"""`steplog replay import`: exported trajectories, or a white-box dump, appended to a log.

All files are read through and checked before anything is written. Then every trajectory is written
whole, many in a transaction. One whose End the topic has already is left out: so files may be
imported twice, and an import that was killed is done again from the start.
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
from replay.importer.files import Files, Found
from replay.importer.records import BadRow, records_of
from replay.offset_ranges import spans_of
from replay.settings import ImportSettings
from schemas import Codec, PolicyVersion, SchemaError, TrajectoryEnd
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress

HEADER = "steplog.imported_from"
CHUNK_RECORDS = 2_000
CHUNK_BYTES = 8 * 1024 * 1024
"""Of one transaction, about: it must be over long before it times out."""
PATIENCE = 60.0


def import_files(settings: ImportSettings) -> str:
    """Writes the trajectories; says what it wrote."""
    files = Files(settings.files, settings.run, settings.channel)
    topics.check(settings)
    importer = Importer(settings)
    steps, skipped = importer.check(files)
    if settings.dry_run:
        return f"{steps:,} Steps can be imported"
    if settings.rewards is not None:
        topics.create_rewarded_topic(settings, settings.rewards)
    left_out = f"; {skipped:,} were invalid, or posted by an environment" if skipped else ""
    return importer.write(files, steps) + left_out


class Importer:
    def __init__(self, settings: ImportSettings) -> None:
        self._settings = settings
        self._codec = settings.codec()
        self._topic = settings.topic_name(settings.topic)
        self._live = asyncio.run(_live_runs(settings, self._codec))
        self._there = Uids()

    def check(self, files: Files) -> tuple[int, int]:
        """Steps that can be written, and trajectories that cannot."""
        steps = skipped = 0
        for found in files:
            if _is_left_out(found.one.trajectory):
                skipped += 1
                continue
            self._check_run(found)
            self._outputs(found)
            steps += len(found.one.steps)
        if not steps:
            named = ", ".join(map(str, files.paths))
            raise Fatal(f"there are no Steps in {named} that can be imported")
        return steps, skipped

    def _check_run(self, found: Found) -> None:
        run = found.one.trajectory.run
        if self._settings.run is None and run in self._live:
            raise Fatal(
                f"{found.where} is of run {run}, which is trained here: its trainer would take the "
                "Steps for its own, so give them another name with --run"
            )

    def _read_what_is_there(self) -> None:
        """The uids of the trajectories that the topic has."""
        spans = spans_of(self._settings, self._settings.topic)
        with Scan(self._settings, self._settings.topic, spans) as scan:
            for message in scan:
                value = message.value()
                if value is not None and _is_end(self._codec, value):
                    end = self._codec.decode(value)
                    assert isinstance(end, TrajectoryEnd)
                    self._there.add(end.trajectory_uid)

    def write(self, files: Files, steps: int) -> str:
        written = Counts()
        transactions = Transactions(
            self._settings,
            group="",
            transactional_id=f"{self._topic}-import",
            patience=PATIENCE,
            probe=lambda stage: None,
        )
        self._read_what_is_there()  # an earlier import's last transaction is over by now
        with show_progress("importing", steps) as moved:
            for chunk in _chunks(self._new(files, written)):
                transactions.write(chunk)
                moved(written.steps + written.known)
        wait_until_readable(self._settings, self._settings.topic)
        told = f"{written.trajectories:,} trajectories, {written.steps:,} Steps in {self._topic}"
        if written.known:
            told += f"; Steps that it had already: {written.known:,}"
        return told

    def _new(self, files: Files, counts: "Counts") -> Iterator[list[Output]]:
        for found in files:
            about = found.one.trajectory
            if _is_left_out(about):
                continue
            if about.trajectory_uid in self._there:
                counts.known += len(found.one.steps)
                continue
            self._there.add(about.trajectory_uid)
            counts.trajectories += 1
            counts.steps += len(found.one.steps)
            yield self._outputs(found)

    def _outputs(self, found: Found) -> list[Output]:
        headers = [(HEADER, _origin(found).encode())]
        try:
            records = records_of(found.one, self._settings.run)
            values = [self._codec.encode(record, self._topic) for record in records]
        except (BadRow, SchemaError) as error:
            raise Fatal(f"{found.where} cannot be imported: {error}") from error
        if max(map(len, values)) > MAX_RECORD_BYTES:
            raise Fatal(
                f"{found.where} cannot be imported: a record of trajectory "
                f"{found.one.trajectory.trajectory_uid} takes more than {MAX_RECORD_BYTES:,} bytes"
            )
        key = found.one.trajectory.prompt_uid
        return [Output(self._topic, key, value, headers) for value in values]


def _is_left_out(about: TrajectoryRow) -> bool:
    """In a posted one nobody knows which weights answered; Steps would say that somebody does."""
    return about.problem is not None or about.posted


class Counts:
    trajectories = 0
    steps = 0
    known = 0


def _origin(found: Found) -> str:
    about = found.one.trajectory
    if not about.topic:
        return found.where.rpartition("/")[2]
    return f"{about.topic}[{about.partition}]@{about.offset} {about.schema}"


def _chunks(works: Iterable[list[Output]]) -> Iterator[list[Output]]:
    chunk: list[Output] = []
    size = 0
    for outputs in works:
        chunk += outputs
        size += sum(len(output.value or b"") for output in outputs)
        if len(chunk) >= CHUNK_RECORDS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class Uids:
    """A set of trajectory_uids that takes eight bytes for each: their hashes, sorted."""

    RECENT = 100_000

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.uint64)
        self._recent: set[int] = set()

    def add(self, uid: str) -> None:
        self._recent.add(_hash(uid))
        if len(self._recent) >= self.RECENT:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.union1d(self._sorted, recent)
            self._recent = set()

    def __contains__(self, uid: str) -> bool:
        key = _hash(uid)
        if key in self._recent:
            return True
        place = int(np.searchsorted(self._sorted, np.uint64(key)))
        return place < len(self._sorted) and int(self._sorted[place]) == key


def _hash(uid: str) -> int:
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little")


def _is_end(codec: Codec, value: bytes) -> bool:
    try:
        return codec.type_of(value) is TrajectoryEnd
    except SchemaError:
        return False


async def _live_runs(connection: Connection, codec: Codec) -> set[str]:
    """Those that a trainer has opened versions of."""
    records = await read_records(connection, POLICY, codec)
    return {record.run for record in records if isinstance(record, PolicyVersion)}
