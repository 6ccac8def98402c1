"""One life of the trainer of an offline run. It joins no group and commits no offsets: the ledger says
how far it is. A life that is still at work is not disturbed on the same machine; one on another machine
is fenced off.
"""

import asyncio
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pool.connection import Connection
from pool.consumers.transaction import Transactions
from pool.core.groups import GroupAssembler
from pool.core.trajectories import Trajectory
from pool.readers.reader import open_topic
from pool.readers.selection import Selection, SelectionSettings
from schemas import Decision, PartitionOffsets
from servicekit.errors import Fatal, OffsetLost
from servicekit.tokenizer import TokenizerFolder
from trainer.incarnation import transactional_id
from trainer.life import Life, now_ms
from trainer.offline.beginning import Beginning, check_ids
from trainer.offline.source import RangeSource
from trainer.settings import TrainSettings, part

PATIENCE = 120.0
"""Seconds that a broker may be away."""
LOCK = ".lock"


class OfflineLife(Life):
    consumer: RangeSource

    def __init__(
        self,
        settings: TrainSettings,
        beginning: Beginning,
        tokenizer: TokenizerFolder,
        probe: Callable[[str], None],
    ) -> None:
        run, topic = settings.run, settings.topic
        fence = Transactions(settings, run, transactional_id(settings, run), PATIENCE, probe)
        super().__init__(settings, run, topic)
        # Another life may have begun the run since it was looked at.
        self._beginning = Beginning.of(self.ledger.decision(1)) or beginning
        self._beginning.demand(settings)
        self._settings = settings
        self._tokenizer = tokenizer
        self._selection = Selection(part(settings, SelectionSettings), settings.channel)
        offsets = self.ledger.offsets() or {at.partition: at for at in self._beginning.offsets()}
        kept = asyncio.run(_kept(settings, topic))
        _check_kept(topic, offsets, kept)
        self.assemblers = {number: self._assembler(number) for number in offsets}
        self.consumer = RangeSource(
            settings, topic, self._beginning.spans, offsets, kept, self.assemblers, fence.write
        )
        first = [] if self.ledger.sequence else [self._first()]
        self.write(self.started(), *first)

    def _first(self) -> Decision:
        return Decision(
            run=self.run,
            incarnation=self.number,
            sequence=1,
            offsets=self._beginning.offsets(),
            settings=self._beginning.text(),
            created_at=now_ms(),
            topic=self.topic,
        )

    def _assembler(self, partition: int) -> GroupAssembler:
        first = self._beginning.spans[partition].first

        def selects(trajectory: Trajectory) -> bool:
            ended = trajectory.records[-1].offset
            if ended < first or not self._selection.matches(trajectory):
                return False
            check_ids(trajectory, self._tokenizer)
            return True

        return GroupAssembler(
            self._settings.group_rules(),
            self.ledger.decided_groups(partition),
            self.ledger.decided_others(),
            selects=selects,
        )


async def _kept(connection: Connection, topic: str) -> dict[int, int]:
    async with open_topic(connection, topic) as reader:
        return {n: bound.low for n, bound in (await reader.bounds(reader.partitions)).items()}


def _check_kept(topic: str, offsets: dict[int, PartitionOffsets], kept: dict[int, int]) -> None:
    for number, at in offsets.items():
        if at.rebuild < kept[number]:
            raise OffsetLost(
                f"partition {number} of {topic} begins at offset {kept[number]}, and the run goes on "
                f"from {at.rebuild}: retention has deleted what it was to train; begin another run"
            )


@contextmanager
def alone(checkpoints: Path, run: str) -> Iterator[None]:
    """Refuses to train where another process trains the same run. The kernel lets go of the lock when
    its holder dies, however it dies."""
    file = checkpoints / run / LOCK
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = file.open("w")
    except OSError as error:
        raise Fatal(f"{file} cannot be written: {error.strerror}") from error
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fatal(
                f"run {run} is being trained by another process, which holds {file}; "
                "wait until it ends, or give the run another name"
            ) from None
        yield
