"""What the server knows: a fold of groups and events, the same live and when it is rebuilt.

Differences from Atropos' own server, none of which its clients depend on:

* One batch is formed for one that is asked for, the oldest groups first. So the step counts batches
  that trainers got, by ones, and what is not handed out yet counts in the queue, by which environments
  hold back.
* A registration counts although groups came before it.
* Environments that fell silent count neither in weights nor in minimums.
* An environment that is started again has its id and name again.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gateway.atropos.agents.scored_group import CHANNEL, closed_at
from gateway.atropos.state.batches import fill, form
from gateway.atropos.state.buffer import Buffer
from gateway.atropos.state.events import (
    AnyEvent,
    Began,
    Closed,
    Env,
    Formed,
    Handed,
    Joined,
    Left,
    Registered,
    Reset,
    Resized,
    Snapshot,
    Training,
)
from gateway.atropos.state.queue import Group, Queue

UNKNOWN = -1
"""What /info says of numbers that no trainer has registered."""


class State:
    def __init__(self) -> None:
        self.applied = 0
        self.batches = 0
        self.max_token_len = UNKNOWN
        self.latest: Group | None = None
        self.ends: dict[int, int] = {}
        """By partition of `rewarded`: where the next group may lie."""
        self.reading: dict[int, int] = {}
        self.closed: dict[str, Closed] = {}
        """As in a snapshot; a reset forgets groups, not that they came."""
        self.silent: frozenset[int] = frozenset()
        """Environments that have not been heard of for long; nothing that the log knows."""
        self._clear()

    def _clear(self) -> None:
        self.training: Training | None = None
        self.started = False
        self.step = 0
        self.envs: list[Env] = []
        self.queue = Queue()
        self.buffers: dict[int, Buffer] = {}
        self.unhanded: dict[int, list[Group]] = {}
        """Batches by number, oldest first."""

    @property
    def batch_size(self) -> int:
        return self.training.batch_size if self.training else UNKNOWN

    def env(self, env_id: int) -> Env | None:
        """Negative ids count from the end, as they do for Atropos."""
        return self.envs[env_id] if -len(self.envs) <= env_id < len(self.envs) else None

    def counted(self) -> Iterator[tuple[int, Env]]:
        """The environments whose weights and minimums count."""
        for env_id, env in enumerate(self.envs):
            if env.connected and env_id not in self.silent:
                yield env_id, env

    def minimums(self) -> dict[int, float]:
        return {
            env_id: env.min_batch_allocation
            for env_id, env in self.counted()
            if env.min_batch_allocation is not None
        }

    def next_batch(self) -> Formed | None:
        """Which groups the next batch would have; nothing changes until it is applied."""
        minimums = self.minimums()
        if self._agents_wait() and not minimums:
            groups = fill(self.queue, self.batch_size)
        else:
            groups = form(self.queue, self.batch_size, minimums)
        if groups is None:
            return None
        return Formed(number=self.batches + 1, groups=[group.sequence for group in groups])

    def _agents_wait(self) -> bool:
        waits = None in self.queue.sequences  # of an environment mostly, and then cheap to tell
        return waits and any(group.record.channel == CHANNEL for group in self.queue)

    def take_in(self, group: Group) -> int | None:
        """Where a group belongs: None is the queue, else it is the size of the environment's buffer
        afterwards. Its groups may have left for the queue together."""
        self.applied = max(self.applied, group.sequence)
        at = group.place
        self.ends[at.partition] = max(self.ends.get(at.partition, 0), at.offset + 1)
        if group.record.channel == CHANNEL:
            closed = Closed(at.partition, at.offset, closed_at(group.record))
            self.close(group.record.prompt_uid, closed)
        env = None if group.env_id is None else self.env(group.env_id)
        if group.env_id is None or env is None or env.group_size == group.size:
            self._enqueue([group])
            return None
        buffer = self.buffers.get(group.env_id)
        if buffer is None or buffer.target != env.group_size:
            buffer = Buffer(env.group_size, buffer.groups if buffer else ())
            self.buffers[group.env_id] = buffer
        self._enqueue(buffer.add(group))
        return buffer.sequences

    def close(self, prompt_uid: str, closed: Closed) -> None:
        """A group of agents has closed; whether it was taken in does not matter."""
        self.closed[prompt_uid] = closed

    def read_up_to(self, partition: int, rebuild: int, memory: int) -> None:
        """Groups of agents are assembled again from `rebuild` on, and what lies `memory` before it is
        read to know what is late; groups that closed before need not be known."""
        if self.reading.get(partition) == rebuild:
            return
        self.reading[partition] = rebuild
        self.closed = {
            uid: closed
            for uid, closed in self.closed.items()
            if closed.partition != partition or closed.offset >= rebuild - memory
        }

    def _enqueue(self, groups: Iterable[Group]) -> None:
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
            case Reset():
                self._clear()

    def _register(self, training: Training) -> None:
        """The first trainer's numbers count; the others share its batches."""
        if self.training is None:
            self.training = training
            self.max_token_len = training.max_token_len
            self.step = training.starting_step

    def _join(self, event: Joined) -> None:
        if not self.started:
            return
        if event.env_id is not None and self.rejoins(event):
            name = self.envs[event.env_id].real_name
            self.envs[event.env_id] = msgspec.structs.replace(event.env, real_name=name)
        else:
            namesakes = sum(other.desired_name == event.env.desired_name for other in self.envs)
            name = f"{event.env.desired_name}_{namesakes}"
            self.envs.append(msgspec.structs.replace(event.env, real_name=name))

    def rejoins(self, event: Joined) -> bool:
        """Whether the place that it takes is still there: a reset may have come between."""
        if event.env_id is None or event.env_id >= len(self.envs):
            return False
        return self.envs[event.env_id].desired_name == event.env.desired_name

    def _form(self, event: Formed) -> None:
        self.batches = event.number
        if all(sequence in self.queue for sequence in event.groups):  # else they were reset
            self.unhanded[event.number] = [self.queue.take(s) for s in event.groups]
            self.step += 1

    def held(self) -> Iterator[Group]:
        """Every group that is needed after a restart."""
        yield from self.queue
        for buffer in self.buffers.values():
            yield from buffer.groups
        for batch in self.unhanded.values():
            yield from batch
        if self.latest is not None:
            yield self.latest

    def snapshot(self) -> Snapshot:
        floors = dict(self.ends)
        for group in self.held():
            at = group.place
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
        )

    def restore(self, at: Snapshot, groups: Mapping[int, Group]) -> None:
        """`groups` are those that the log still has."""
        self._clear()
        self.applied, self.batches, self.step = at.applied, at.batches, at.step
        self.training, self.max_token_len, self.started = (
            at.training,
            at.max_token_len,
            at.started,
        )
        self.envs = at.envs
        self.ends = dict(at.floors)
        self.reading, self.closed = at.reading, at.closed
        self.queue = Queue(_found(at.queue, groups))
        for env_id, sequences in at.buffers.items():
            env = self.env(env_id)
            target = env.group_size if env else 0
            self.buffers[env_id] = Buffer(target, _found(sequences, groups))
        self.unhanded = {n: list(_found(batch, groups)) for n, batch in at.unhanded.items()}
        self.latest = groups.get(at.latest) if at.latest is not None else None


def needed(at: Snapshot) -> set[int]:
    """The groups that a snapshot names."""
    latest = [] if at.latest is None else [at.latest]
    parts = (at.queue, *at.buffers.values(), *at.unhanded.values(), latest)
    return {sequence for part in parts for sequence in part}


def _sequences(groups: Iterable[Group]) -> list[int]:
    return [group.sequence for group in groups]


def _found(sequences: Iterable[int], groups: Mapping[int, Group]) -> Iterator[Group]:
    return (groups[sequence] for sequence in sequences if sequence in groups)
