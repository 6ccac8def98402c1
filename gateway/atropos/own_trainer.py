"""steplog's own trainer as the consumer of posted groups (`--train`).

A trainer of Atropos registers and pulls batches. steplog's own does neither: it reads groups from
`rewarded` as it reads those of agents. So what environments wait for is taken from the records that
it writes anyway. `policy` says that it has started, with which batch size, and which version is live;
`ledger` says which groups it has decided, and those no longer wait.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from gateway.atropos.log.writer import LogWriter
from gateway.atropos.state.events import Advanced, TrainerPosition, Training
from gateway.atropos.state.queue import QueuedGroup
from gateway.atropos.state.state import UNKNOWN, AtroposState
from pool.connection import Connection
from pool.readers.reader import TopicReader, open_topic
from pool.topics import LEDGER, POLICY, REWARDED
from schemas import Codec, Decision, PolicyVersion, Record, SchemaError, SkippedRange
from servicekit.errors import BrokerUnavailable, Fatal
from servicekit.trackers import PROJECT

log = logging.getLogger(__name__)

CHANNEL = "train"
"""Channel of the groups that are posted for steplog's trainer."""
POLL_S = 0.2
"""Pause between checks for new records."""
RETRY_AFTER_S = 1.0
NO_LIMIT = 2**31 - 1
"""Number of steps for environments that leave it to the trainer: they pause when it stops."""
CHECKPOINTS = "checkpoints"
"""Where environments keep their own state, relative to the folder that they are started in."""
CHECKPOINT_EVERY = 20
"""Versions between two checkpoints of an environment, as many as between those of the trainer."""


class OwnTrainer:
    def __init__(
        self,
        connection: Connection,
        codec: Codec,
        writer: LogWriter,
        state: AtroposState,
        run: str,
    ) -> None:
        self._connection = connection
        self._codec = codec
        self._writer = writer
        self._state = state
        self._run = run
        self.problem: str | None = None
        """Why the trainer that started last gets no groups from here."""

    async def follow(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                async with (
                    open_topic(self._connection, POLICY) as policy,
                    open_topic(self._connection, LEDGER) as ledger,
                ):
                    while True:
                        await self._catch_up(policy, ledger)
                        await asyncio.sleep(POLL_S)
            except BrokerUnavailable as error:
                log.warning("Cannot read what the trainer does; trying again: %s", error)
                await asyncio.sleep(RETRY_AFTER_S)

    async def _catch_up(self, policy: TopicReader, ledger: TopicReader) -> None:
        """Reads all new records and applies what they say, as one event."""
        state, read = self._state, self._state.trainer_read
        training, step = None, state.step
        ends = TrainerPosition(policy=await _end(policy), ledger=await _end(ledger))
        async for record in self._read(policy, read.policy, ends.policy):
            if isinstance(record, PolicyVersion) and record.run == self._run:
                if record.phase == "started":
                    training = self._training(record)
                elif record.phase == "live":
                    step = max(step, record.version)
        decided = _DecidedGroups()
        async for record in self._read(ledger, read.ledger, ends.ledger):
            if isinstance(record, Decision) and record.run == self._run:
                decided.add(record)
        # The trainer may have been faster than we: its groups must be in the queue first.
        await self._writer.wait_for_pending()
        sequences = [group.sequence for group in state.queue if group in decided]
        if training is None and step == state.step and not sequences:
            state.trainer_read = ends
            return
        event = Advanced(training=training, step=step, decided=sequences, read=ends)
        await self._writer.append_event(event, lambda: None)

    async def _read(self, reader: TopicReader, first: int, end: int) -> AsyncIterator[Record]:
        low = (await reader.bounds([0]))[0].low
        if max(first, low) >= end:
            return
        async for message in reader.read({0: max(first, low)}, {0: end}):
            try:
                yield self._codec.decode(message.value)
            except SchemaError as error:
                log.warning("Skipped a record of %s: %s", message.topic, error)

    def _training(self, started: PolicyVersion) -> Training | None:
        """What environments are told about a trainer that has started."""
        self.problem = _find_mismatch(started)
        if self.problem is not None:
            log.warning("Environments of run %s have to wait: %s", self._run, self.problem)
            return None
        return Training(
            wandb_group=self._run,
            wandb_project=PROJECT,
            batch_size=UNKNOWN,
            max_token_len=UNKNOWN,
            checkpoint_dir=CHECKPOINTS,
            save_checkpoint_interval=CHECKPOINT_EVERY,
            starting_step=started.version,
            num_steps=NO_LIMIT,
            groups_per_batch=started.groups_per_batch,
        )


class _DecidedGroups:
    """The groups that some Decisions name, or passed over because they were too old to be read."""

    def __init__(self) -> None:
        self._prompts: set[str] = set()
        self._skipped: list[SkippedRange] = []

    def add(self, decision: Decision) -> None:
        self._prompts.update(group.prompt_uid for group in decision.groups)
        self._skipped += decision.skipped

    def __contains__(self, group: QueuedGroup) -> bool:
        at = group.position
        return group.record.prompt_uid in self._prompts or any(
            skipped.partition == at.partition and skipped.first <= at.offset < skipped.end
            for skipped in self._skipped
        )


def check_consumer(state: AtroposState, run: str, is_own: bool) -> None:
    """Refuses to change who takes the groups of a run: those that wait are meant for the other one."""
    if not is_own and state.has_own_trainer:
        raise Fatal(
            f"the groups of run {run} are trained by `steplog train`; start this server with --train, "
            "or choose another name with --run"
        )
    is_pulled = state.training is not None and not state.has_own_trainer
    has_groups = any(group.record.channel != CHANNEL for group in state.queue)
    if is_own and (is_pulled or has_groups):
        raise Fatal(
            f"the groups of run {run} wait for a trainer that pulls batches; choose another name with "
            "--run, or start this server without --train and forget them with GET /reset_data"
        )


def _find_mismatch(started: PolicyVersion) -> str | None:
    if started.topic != REWARDED:
        return (
            f"the trainer reads {started.topic}, and groups are posted to {REWARDED}; start it "
            "without --rewards"
        )
    if started.groups_per_batch is None:
        return "the trainer is of an earlier release, which does not say its batch size; upgrade it"
    return None


async def _end(reader: TopicReader) -> int:
    return (await reader.ends([0]))[0]
