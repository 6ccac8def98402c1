"""One incarnation of the trainer of an offline run.

It joins no consumer group and commits no offsets: the ledger says how far the run is. While another
process trains the run on the same machine, it refuses to start; one on another machine is fenced off.
"""

import asyncio
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pool.connection import Connection
from pool.consumers.transaction import Transactions
from pool.core.group_assembler import GroupAssembler
from pool.core.trajectories import Trajectory
from pool.readers.reader import open_topic
from pool.readers.selection import Selection, SelectionSettings
from schemas import Decision, PartitionOffsets
from servicekit.errors import Fatal, OffsetLost
from servicekit.tokenizer import TokenizerFolder
from trainer.incarnation.base import Incarnation, now_ms
from trainer.incarnation.live import transactional_id
from trainer.offline.run_definition import RunDefinition, check_tokenizer
from trainer.offline.source import RangeSource
from trainer.settings import TrainSettings, section

PATIENCE_S = 120.0
"""Seconds that a broker may be unreachable."""
LOCK = ".lock"


class OfflineIncarnation(Incarnation):
    consumer: RangeSource

    def __init__(
        self,
        settings: TrainSettings,
        definition: RunDefinition,
        tokenizer: TokenizerFolder,
        probe: Callable[[str], None],
    ) -> None:
        run, topic = settings.run, settings.topic
        fence = Transactions(settings, run, transactional_id(settings, run), PATIENCE_S, probe)
        super().__init__(settings, run, topic)
        # Another process may have started the run since its definition was read.
        self._definition = RunDefinition.decode(self.ledger.decision(1)) or definition
        self._definition.check_settings(settings)
        self._settings = settings
        self._tokenizer = tokenizer
        self._selection = Selection(section(settings, SelectionSettings), settings.channel)
        offsets = self.ledger.offsets() or {o.partition: o for o in self._definition.offsets()}
        log_starts = asyncio.run(_log_starts(settings, topic))
        _check_not_deleted(topic, offsets, log_starts)
        self.assemblers = {number: self._make_assembler(number) for number in offsets}
        self.consumer = RangeSource(
            settings,
            topic,
            self._definition.spans,
            offsets,
            log_starts,
            self.assemblers,
            fence.write,
        )
        first = [] if self.ledger.sequence else [self._first_decision()]
        self.write(self.started_record(), *first)

    def _first_decision(self) -> Decision:
        return Decision(
            run=self.run,
            incarnation=self.number,
            sequence=1,
            offsets=self._definition.offsets(),
            settings=self._definition.encode(),
            created_at=now_ms(),
            topic=self.topic,
        )

    def _make_assembler(self, partition: int) -> GroupAssembler:
        first = self._definition.spans[partition].first

        def is_selected(trajectory: Trajectory) -> bool:
            end_offset = trajectory.records[-1].offset
            if end_offset < first or not self._selection.matches(trajectory):
                return False
            check_tokenizer(trajectory, self._tokenizer)
            return True

        return GroupAssembler(
            self._settings.group_rules(),
            self.ledger.decided_groups(partition),
            self.ledger.decided_others(),
            selects=is_selected,
        )


async def _log_starts(connection: Connection, topic: str) -> dict[int, int]:
    """The first offset of each partition that retention has left."""
    async with open_topic(connection, topic) as reader:
        return {n: bound.low for n, bound in (await reader.bounds(reader.partitions)).items()}


def _check_not_deleted(
    topic: str, offsets: dict[int, PartitionOffsets], log_starts: dict[int, int]
) -> None:
    for number, partition_offsets in offsets.items():
        rebuild = partition_offsets.rebuild
        if rebuild < log_starts[number]:
            raise OffsetLost(
                f"partition {number} of {topic} starts at offset {log_starts[number]}, but the run "
                f"continues at {rebuild}: retention has deleted data of its range; start a new run"
            )


@contextmanager
def lock_run(checkpoints: Path, run: str) -> Iterator[None]:
    """Refuses to start while another process on this machine trains the same run. The kernel releases
    the lock when its holder dies, however it dies."""
    file = checkpoints / run / LOCK
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock_file = file.open("w")
    except OSError as error:
        raise Fatal(f"{file} cannot be written: {error.strerror}") from error
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fatal(
                f"run {run} is being trained by another process, which holds {file}; "
                "wait until it ends, or choose another name with --run"
            ) from None
        yield
