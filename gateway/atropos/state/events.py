"""What happens to the state besides groups, as it stands in the topic `atropos`.

The state is the fold of these and of the ScoredGroups of the run in the order of their sequence
numbers. An event says what was decided, never how: which groups a batch has stands in it.
"""

import msgspec

LIFE_BITS = 32


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer registered."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class Env(msgspec.Struct, kw_only=True):
    """What an environment registered; its id is its place in the list of all of them."""

    max_context_len: int
    weight: float
    desired_name: str
    group_size: int
    min_batch_allocation: float | None = None
    real_name: str = ""
    connected: bool = True


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    pass


class Claimed(Event, frozen=True, kw_only=True):
    """A server begins a life. Whoever served the run before stops when it reads this."""

    owner: str
    """Names the process that starts servers one after another: it knows that the last one is over."""


class Registered(Event, frozen=True, kw_only=True):
    training: Training


class Began(Event, frozen=True, kw_only=True):
    """The trainer asked for its first batch."""


class Joined(Event, frozen=True, kw_only=True):
    env: Env
    env_id: int | None = None
    """Whose place it takes: that of a namesake which is gone, so that an environment that was
    restarted is the same one as before."""


class Left(Event, frozen=True, kw_only=True):
    env_id: int


class Resized(Event, frozen=True, kw_only=True):
    """An environment's own groups in the queue are larger than it said."""

    env_id: int
    group_size: int


class Formed(Event, frozen=True, kw_only=True):
    """A batch is made; it is delivered until it is handed over."""

    number: int
    groups: list[int]


class Handed(Event, frozen=True, kw_only=True):
    number: int


class Reset(Event, frozen=True, kw_only=True):
    pass


class Settled(Event, frozen=True, kw_only=True):
    """Nothing but the record's `settled`: answers were sent, and no other record says so."""


class Closed(msgspec.Struct, frozen=True, array_like=True):
    """Where the newest group of agents closed that a prompt had."""

    partition: int
    offset: int
    """In `rewarded`; nothing of the group lies behind it."""
    closed_at: int
    """In `steps`: who began before it is late."""


class Snapshot(Event, frozen=True, kw_only=True):
    """The whole state, without the groups themselves, so that nobody reads what came before."""

    applied: int
    """The highest sequence number that is in it."""
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
    """By partition of `rewarded`: nothing that is needed lies below."""
    owner: str = ""
    """As in the claim; empty when the server has stopped."""
    reading: dict[int, int] = {}
    """By partition of `rewarded`: groups of agents are assembled from here on."""
    closed: dict[str, Closed] = {}
    """By prompt: of the groups of agents that would be assembled again."""


AnyEvent = (
    Claimed
    | Registered
    | Began
    | Joined
    | Left
    | Resized
    | Formed
    | Handed
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


def life_of(sequence: int) -> int:
    return sequence >> LIFE_BITS


def first_of(life: int) -> int:
    """Sequence numbers of a life follow this one: those of two servers are never mixed up."""
    return life << LIFE_BITS
