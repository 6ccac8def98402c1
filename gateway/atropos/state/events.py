"""Events that change the state besides groups, as they are stored in the topic `atropos`.

The state is the fold of these events and of the run's ScoredGroups, in the order of their sequence
numbers. An event records the result of a decision, never its inputs: a formed batch lists its groups.
The lower-case class names are the events' tags in the log.
"""

import msgspec

EPOCH_BITS = 32


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's settings: as it registered them, or as steplog's own wrote them to `policy`."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    groups_per_batch: int | None = None
    """Set for steplog's own trainer, which takes groups of any size; `batch_size` is unused then."""

    @property
    def is_own(self) -> bool:
        return self.groups_per_batch is not None


class Env(msgspec.Struct, kw_only=True):
    """An environment that has registered; its id is its index in the list of all of them."""

    max_context_len: int
    weight: float
    desired_name: str
    group_size: int
    min_batch_allocation: float | None = None
    real_name: str = ""
    connected: bool = True
    host: str = ""
    """Address of the machine that it registered from."""
    registered_group_size: int = 0
    """`group_size` as it registered it; that grows with larger groups that it posts."""

    def is_same_environment(self, other: "Env") -> bool:
        """Whether a registration may be a restart of this environment. Names alone do not tell:
        variants of an environment share one. Weights and minimum allocations may be tuned."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[str, int, int]:
        group_size = self.registered_group_size or self.group_size
        return self.desired_name, group_size, self.max_context_len


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    pass


class Claimed(Event, frozen=True, kw_only=True):
    """A server starts to serve the run. The previous server stops when it reads this."""

    owner: str
    """Id of the supervisor, which starts a server only after its previous one has ended."""


class Registered(Event, frozen=True, kw_only=True):
    training: Training


class Began(Event, frozen=True, kw_only=True):
    """The trainer asked for its first batch."""


class Joined(Event, frozen=True, kw_only=True):
    env: Env
    env_id: int | None = None
    """The same environment, if it has registered before and is gone: so an environment that was
    restarted keeps its id."""


class Left(Event, frozen=True, kw_only=True):
    env_id: int


class Resized(Event, frozen=True, kw_only=True):
    """An environment's queued groups are larger than the group size that it registered."""

    env_id: int
    group_size: int


class Formed(Event, frozen=True, kw_only=True):
    """A batch is formed. It is sent, again if need be, until it is handed over."""

    number: int
    groups: list[int]


class Handed(Event, frozen=True, kw_only=True):
    """A batch was sent completely."""

    number: int


class TrainerPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Up to which offsets the records of steplog's own trainer were read."""

    policy: int = 0
    ledger: int = 0


class Advanced(Event, frozen=True, kw_only=True):
    """steplog's own trainer has started, has made a version, or has decided groups."""

    training: Training | None = None
    step: int = 0
    decided: list[int] = []
    """Sequences of groups that no longer wait."""
    read: TrainerPosition


class Reset(Event, frozen=True, kw_only=True):
    pass


class Settled(Event, frozen=True, kw_only=True):
    """Carries only the record's `settled`: says which answers were sent when no other record does."""


class ClosedAgentGroup(msgspec.Struct, frozen=True, array_like=True):
    """Where the newest group of agents of a prompt closed."""

    partition: int
    offset: int
    """In `rewarded`: no record of the group lies after it."""
    closed_at: int
    """In `steps`: trajectories that began before it are late."""


class Snapshot(Event, frozen=True, kw_only=True):
    """The whole state, without the groups themselves. A rebuild reads nothing before it."""

    applied: int
    """The highest sequence number that it includes."""
    training: Training | None
    max_token_len: int
    started: bool
    step: int
    batches: int
    envs: list[Env]
    queue: list[int]
    buffers: dict[int, list[int]]
    unhanded: dict[int, list[int]]
    latest: int | None
    floors: dict[int, int]
    """By partition of `rewarded`: the lowest offset that is needed."""
    owner: str = ""
    """As in Claimed; empty when the server has stopped."""
    reading: dict[int, int] = {}
    """By partition of `rewarded`: the offset from which groups of agents are assembled."""
    closed: dict[str, ClosedAgentGroup] = {}
    """By prompt: closed groups of agents that would otherwise be assembled again."""
    trainer_read: TrainerPosition = TrainerPosition()
    newest_group_size: int = 0


AnyEvent = (
    Claimed
    | Registered
    | Began
    | Joined
    | Left
    | Resized
    | Formed
    | Handed
    | Advanced
    | Reset
    | Settled
    | Snapshot
)

_decoder = msgspec.json.Decoder(AnyEvent)


def decode_event(text: str) -> AnyEvent:
    event: AnyEvent = _decoder.decode(text)
    return event


def encode_event(event: Event) -> str:
    return msgspec.json.encode(event).decode()


def epoch_of(sequence: int) -> int:
    """The number of the server's start, counted per run, that a sequence number belongs to."""
    return sequence >> EPOCH_BITS


def first_sequence(epoch: int) -> int:
    """The number before all others of an epoch, so that those of two servers never mix."""
    return epoch << EPOCH_BITS
