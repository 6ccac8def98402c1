"""The server's state: a fold of groups and events, the same live and after a rebuild.

Differences from Atropos' own server, none of which its clients depend on:

* A batch is formed when a trainer asks for one, from the oldest groups. So the step counts the batches
  that trainers got, and groups that are not handed out yet count in the queue length, by which
  environments throttle themselves.
* A trainer may register after groups were posted.
* Environments that fell silent are ignored in weights and minimum allocations.
* An environment that is restarted keeps its id and name.
* steplog's own trainer takes groups of any size from the log: they wait until it has decided them.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gateway.atropos.agents.scored_group import closing_offset, is_of_agents
from gateway.atropos.state.batches import form_in_packs, form_of_any_size
from gateway.atropos.state.buffer import GroupBuffer
from gateway.atropos.state.events import (
    Advanced,
    AnyEvent,
    Began,
    ClosedAgentGroup,
    Env,
    Formed,
    Handed,
    Joined,
    Left,
    Registered,
    Reset,
    Resized,
    Snapshot,
    TrainerPosition,
    Training,
)
from gateway.atropos.state.queue import GroupQueue, QueuedGroup

UNKNOWN = -1
"""What /info answers before a trainer has registered."""


class AtroposState:
    def __init__(self) -> None:
        self.applied = 0
        self.batches = 0
        self.max_token_len = UNKNOWN
        self.latest: QueuedGroup | None = None
        self.ends: dict[int, int] = {}
        """By partition of `rewarded`: the offset at which the next group may lie."""
        self.reading: dict[int, int] = {}
        self.closed: dict[str, ClosedAgentGroup] = {}
        """Like `reading`, as in a snapshot. A reset drops groups, but not that they closed."""
        self.silent: frozenset[int] = frozenset()
        """Environments that have sent nothing for long; not in the log."""
        self.trainer_read = TrainerPosition()
        self._clear()

    def _clear(self) -> None:
        self.training: Training | None = None
        self.started = False
        self.step = 0
        self.envs: list[Env] = []
        self.newest_group_size = 0
        """Group size of the environment that registered last."""
        self.queue = GroupQueue()
        self.buffers: dict[int, GroupBuffer] = {}
        self.unhanded: dict[int, list[QueuedGroup]] = {}
        """Batches by number, oldest first, until the log knows that they were delivered."""

    @property
    def batch_size(self) -> int:
        """In sequences. An environment asks for it right after it has registered; for steplog's own
        trainer, which counts groups, the answer is in groups of that environment."""
        if self.training is None:
            return UNKNOWN
        if self.training.groups_per_batch is not None:
            return self.training.groups_per_batch * self.newest_group_size or UNKNOWN
        return self.training.batch_size

    @property
    def has_own_trainer(self) -> bool:
        return self.training is not None and self.training.is_own

    def env(self, env_id: int) -> Env | None:
        """Negative ids count from the end, as they do for Atropos."""
        return self.envs[env_id] if -len(self.envs) <= env_id < len(self.envs) else None

    def active_envs(self) -> Iterator[tuple[int, Env]]:
        """The environments whose weights and minimum allocations count."""
        for env_id, env in enumerate(self.envs):
            if env.connected and env_id not in self.silent:
                yield env_id, env

    def minimums(self) -> dict[int, float]:
        return {
            env_id: env.min_batch_allocation
            for env_id, env in self.active_envs()
            if env.min_batch_allocation is not None
        }

    def next_batch(self) -> Formed | None:
        """Chooses the groups of the next batch; nothing changes until the event is applied."""
        minimums = self.minimums()
        if self._has_agent_groups() and not minimums:
            groups = form_of_any_size(self.queue, self.batch_size)
        else:
            groups = form_in_packs(self.queue, self.batch_size, minimums)
        if groups is None:
            return None
        return Formed(number=self.batches + 1, groups=[group.sequence for group in groups])

    def _has_agent_groups(self) -> bool:
        has_none = None in self.queue.sequences  # cheap, and mostly false
        return has_none and any(is_of_agents(group.record) for group in self.queue)

    def add_group(self, group: QueuedGroup) -> int | None:
        """Adds a group to the queue and returns None; or, if it does not have its environment's group
        size, to the environment's buffer, and returns the buffer's size afterwards. Groups that make up
        the group size move from the buffer to the queue together."""
        self.applied = max(self.applied, group.sequence)
        at = group.position
        self.ends[at.partition] = max(self.ends.get(at.partition, 0), at.offset + 1)
        if is_of_agents(group.record):
            closed = ClosedAgentGroup(at.partition, at.offset, closing_offset(group.record))
            self.mark_closed(group.record.prompt_uid, closed)
        env = None if group.env_id is None else self.env(group.env_id)
        fits = env is None or env.group_size == group.size or self.has_own_trainer
        if group.env_id is None or env is None or fits:
            self._enqueue([group])
            return None
        buffer = self.buffers.get(group.env_id)
        if buffer is None or buffer.target != env.group_size:
            buffer = GroupBuffer(env.group_size, buffer.groups if buffer else ())
            self.buffers[group.env_id] = buffer
        self._enqueue(buffer.add(group))
        return buffer.sequences

    def mark_closed(self, prompt_uid: str, closed: ClosedAgentGroup) -> None:
        """A group of agents has closed, whether or not it was handed on."""
        self.closed[prompt_uid] = closed

    def set_reading_progress(self, partition: int, rebuild: int, memory: int) -> None:
        """A restart would assemble groups of agents from offset `rebuild` on, and read `memory` offsets
        before it to know which trajectories are late. Groups that closed earlier are forgotten."""
        if self.reading.get(partition) == rebuild:
            return
        self.reading[partition] = rebuild
        self.closed = {
            uid: closed
            for uid, closed in self.closed.items()
            if closed.partition != partition or closed.offset >= rebuild - memory
        }

    def _enqueue(self, groups: Iterable[QueuedGroup]) -> None:
        for group in groups:
            self.queue.add(group)
            self.latest = group

    def apply(self, sequence: int, event: AnyEvent) -> None:
        self.applied = max(self.applied, sequence)
        match event:
            case Registered():
                self._register(event.training)
            case Began():
                self.started = self.training is not None
            case Joined():
                self._join(event)
            case Left():
                if env := self.env(event.env_id):
                    env.connected = False
            case Resized():
                if env := self.env(event.env_id):
                    env.group_size = event.group_size
            case Formed():
                self._form(event)
            case Handed():
                self.unhanded.pop(event.number, None)
            case Advanced():
                self._advance(event)
            case Reset():
                self._clear()

    def _register(self, training: Training) -> None:
        """The first trainer's settings count; later ones share its batches."""
        if self.training is None:
            self.training = training
            self.max_token_len = training.max_token_len
            self.step = training.starting_step

    def _advance(self, event: Advanced) -> None:
        self.trainer_read = event.read
        if event.training is not None:
            self.training, self.started = event.training, True
            self.max_token_len = event.training.max_token_len
        self.step = max(self.step, event.step)
        for sequence in event.decided:
            if sequence in self.queue:
                self.queue.take(sequence)

    def _join(self, event: Joined) -> None:
        if not self.started:
            return
        self.newest_group_size = event.env.group_size
        if event.env_id is not None and self.rejoins(event):
            name = self.envs[event.env_id].real_name
            self.envs[event.env_id] = msgspec.structs.replace(event.env, real_name=name)
        else:
            namesakes = sum(other.desired_name == event.env.desired_name for other in self.envs)
            name = f"{event.env.desired_name}_{namesakes}"
            self.envs.append(msgspec.structs.replace(event.env, real_name=name))

    def rejoins(self, event: Joined) -> bool:
        """Whether the environment that it replaces still exists: it may have been reset meanwhile."""
        if event.env_id is None or event.env_id >= len(self.envs):
            return False
        return self.envs[event.env_id].desired_name == event.env.desired_name

    def _form(self, event: Formed) -> None:
        self.batches = event.number
        if all(sequence in self.queue for sequence in event.groups):  # false after a reset
            self.unhanded[event.number] = [self.queue.take(s) for s in event.groups]
            self.step += 1

    def needed_groups(self) -> Iterator[QueuedGroup]:
        """Every group that a restarted server needs."""
        yield from self.queue
        for buffer in self.buffers.values():
            yield from buffer.groups
        for batch in self.unhanded.values():
            yield from batch
        if self.latest is not None:
            yield self.latest

    def snapshot(self) -> Snapshot:
        floors = dict(self.ends)
        for group in self.needed_groups():
            at = group.position
            floors[at.partition] = min(floors.get(at.partition, at.offset), at.offset)
        return Snapshot(
            applied=self.applied,
            training=self.training,
            max_token_len=self.max_token_len,
            started=self.started,
            step=self.step,
            batches=self.batches,
            envs=[msgspec.structs.replace(env) for env in self.envs],
            queue=_sequences(self.queue),
            buffers={env_id: _sequences(b.groups) for env_id, b in self.buffers.items()},
            unhanded={number: _sequences(batch) for number, batch in self.unhanded.items()},
            latest=self.latest.sequence if self.latest else None,
            floors=floors,
            reading=dict(self.reading),
            closed=dict(self.closed),
            trainer_read=self.trainer_read,
            newest_group_size=self.newest_group_size,
        )

    def restore(self, at: Snapshot, groups: Mapping[int, QueuedGroup]) -> None:
        """Restores a snapshot; `groups` are those that the log still has."""
        self._clear()
        self.applied, self.batches, self.step = at.applied, at.batches, at.step
        self.training, self.max_token_len, self.started = (
            at.training,
            at.max_token_len,
            at.started,
        )
        self.envs, self.newest_group_size = at.envs, at.newest_group_size
        self.trainer_read = at.trainer_read
        self.ends = dict(at.floors)
        self.reading, self.closed = at.reading, at.closed
        self.queue = GroupQueue(_existing(at.queue, groups))
        for env_id, sequences in at.buffers.items():
            env = self.env(env_id)
            target = env.group_size if env else 0
            self.buffers[env_id] = GroupBuffer(target, _existing(sequences, groups))
        self.unhanded = {n: list(_existing(batch, groups)) for n, batch in at.unhanded.items()}
        self.latest = groups.get(at.latest) if at.latest is not None else None


def sequences_in(at: Snapshot) -> set[int]:
    """The sequences of all groups that a snapshot names."""
    latest = [] if at.latest is None else [at.latest]
    parts = (at.queue, *at.buffers.values(), *at.unhanded.values(), latest)
    return {sequence for part in parts for sequence in part}


def _sequences(groups: Iterable[QueuedGroup]) -> list[int]:
    return [group.sequence for group in groups]


def _existing(sequences: Iterable[int], groups: Mapping[int, QueuedGroup]) -> Iterator[QueuedGroup]:
    return (groups[sequence] for sequence in sequences if sequence in groups)
