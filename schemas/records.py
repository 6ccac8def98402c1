"""Typed records. Each class is one `.avsc` file; field names, order and defaults are the schema's.

Fields with a closed set of values (`status`, `phase`, `verdict`) are Avro strings, because an Avro enum
cannot gain a symbol without breaking readers that were released before it.
"""

from typing import ClassVar, Literal

import msgspec

from schemas.packing import ID_BYTES

PackedIds = bytes
"""Token ids as little-endian int32."""
PackedLogprobs = bytes
"""Logprobs, or advantages, as little-endian float32."""
Json = str
"""A JSON document as text."""

Status = Literal["completed", "truncated", "failed", "cancelled", "expired"]
Phase = Literal["started", "opened", "live"]
Verdict = Literal[
    "train",
    "stale",
    "expired",
    "late",
    "no_variance",
    "too_few",
    "invalid",
    "orphan",
    "lost",
    "given_up",
    "other_channel",
]


class RecordPart(msgspec.Struct, frozen=True, gc=False):
    """A named part of a record."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """A value of a topic. Records never refer to each other, so the cyclic garbage collector need not
    track the hundreds of thousands that an assembler may hold."""

    schema_file: ClassVar[str]


class Segment(RecordPart, frozen=True, kw_only=True):
    """The tokens of a Step from `first_token` on that one version of the weights sampled."""

    incarnation: int
    version: int
    first_token: int
    kv_version: int | None = None

    @property
    def oldest_version(self) -> int:
        """The oldest version that had a part in sampling the tokens: one whose keys and values they
        may have been sampled from, if the KV cache was kept over updates."""
        return self.version if self.kv_version is None else self.kv_version


class Position(RecordPart, frozen=True, kw_only=True, order=True):
    """Partition and offset of a record, in a topic that the context determines."""

    partition: int
    offset: int


class Step(Record, frozen=True, kw_only=True):
    schema_file = "step.avsc"

    step_id: str
    trajectory_uid: str
    prompt_uid: str
    step_index: int
    run: str
    channel: str = "train"
    prompt_ids: PackedIds
    parent: str | None = None
    prefix_length: int = 0
    prefix_hash: int = 0
    response_ids: PackedIds
    response_logprobs: PackedLogprobs
    segments: list[Segment] = []
    finish_reason: str = "stop"
    sampling: Json = "{}"
    model: str = ""
    tokenizer: str = ""
    request_hash: bytes = b""
    conversation: bytes | None = None
    reward: float | None = None
    metadata: Json = "{}"
    group_size: int | None = None
    deadline: int | None = None
    tenant: str = ""
    is_last: bool = False
    not_trainable: str | None = None
    created_at: int = 0
    source: Position | None = None

    def __post_init__(self) -> None:
        if len(self.response_ids) != len(self.response_logprobs):
            raise ValueError(
                f"{len(self.response_ids) // ID_BYTES} response ids come with "
                f"{len(self.response_logprobs) // ID_BYTES} logprobs"
            )
        if len(self.response_ids) % ID_BYTES or len(self.prompt_ids) % ID_BYTES:
            raise ValueError("packed ids must be whole 4-byte integers")


class Reward(RecordPart, frozen=True, kw_only=True):
    name: str
    version: str = ""
    value: float | None = None
    weight: float = 1.0
    step_id: str | None = None
    details: Json = "{}"


class StepAdvantages(RecordPart, frozen=True, kw_only=True):
    """Advantages of a Step's tokens: one each, or one for all of them."""

    step_id: str
    values: PackedLogprobs


class TrajectoryEnd(Record, frozen=True, kw_only=True):
    schema_file = "trajectory_end.avsc"

    end_id: str
    trajectory_uid: str
    prompt_uid: str
    run: str
    channel: str = "train"
    status: Status
    steps: int
    reward: float | None = None
    reward_expected: bool = False
    reason: str | None = None
    metadata: Json = "{}"
    group_size: int | None = None
    rewards: list[Reward] = []
    created_at: int = 0
    source: Position | None = None
    advantages: list[StepAdvantages] = []
    reward_from_steps: bool = False


class Feedback(Record, frozen=True, kw_only=True):
    schema_file = "feedback.avsc"

    feedback_id: str
    trajectory_uid: str
    prompt_uid: str
    run: str
    channel: str = "train"
    step_id: str | None = None
    reward: float
    metadata: Json = "{}"
    created_at: int = 0
    source: Position | None = None


class StepNote(Record, frozen=True, kw_only=True):
    schema_file = "step_note.avsc"

    note_id: str
    step_id: str
    trajectory_uid: str
    prompt_uid: str
    run: str
    channel: str = "train"
    delivered: bool
    created_at: int = 0
    source: Position | None = None
    overflowed: bool = False


class ScoredGroup(Record, frozen=True, kw_only=True):
    schema_file = "scored_group.avsc"

    group_uid: str
    prompt_uid: str
    run: str
    channel: str = "train"
    sequence: int
    env_id: int | None = None
    tokens: list[PackedIds]
    masks: list[PackedIds]
    scores: list[float]
    advantages: list[bytes] | None = None
    ref_logprobs: list[bytes] | None = None
    inference_logprobs: list[bytes] | None = None
    messages: Json | None = None
    generation_params: Json | None = None
    overrides: Json | None = None
    group_overrides: Json | None = None
    images: Json | None = None
    distill_token_ids: Json | None = None
    distill_logprobs: Json | None = None
    created_at: int = 0
    fingerprint: bytes | None = None
    settled: int = 0


class AtroposEvent(Record, frozen=True, kw_only=True):
    schema_file = "atropos_event.avsc"

    run: str
    sequence: int
    event: Json
    settled: int = 0
    created_at: int = 0


class Registration(Record, frozen=True, kw_only=True):
    schema_file = "registration.avsc"

    trajectory_uid: str
    prompt_uid: str
    run: str
    channel: str = "train"
    metadata: Json = "{}"
    group_size: int | None = None
    deadline: int | None = None
    tenant: str = ""
    gateway: str = ""
    implicit: bool = False
    begins: Position
    status: Status | None = None
    created_at: int = 0


class PolicyVersion(Record, frozen=True, kw_only=True):
    schema_file = "policy_version.avsc"

    run: str
    incarnation: int
    version: int
    phase: Phase
    steps_marks: list[int] = []
    rewarded_marks: list[int] = []
    weights: str | None = None
    created_at: int = 0
    topic: str = "rewarded"
    groups_per_batch: int | None = None
    keep_kv: bool = False


class Member(RecordPart, frozen=True, kw_only=True):
    trajectory_uid: str
    verdict: Verdict
    reason: str = ""
    offsets: list[int] = []


class DecidedGroup(RecordPart, frozen=True, kw_only=True):
    prompt_uid: str
    partition: int
    first_offset: int
    closed_at: int
    verdict: Verdict
    reason: str = ""
    members: list[Member] = []


class PartitionOffsets(RecordPart, frozen=True, kw_only=True):
    partition: int
    committed: int
    rebuild: int


class SkippedRange(RecordPart, frozen=True, kw_only=True):
    partition: int
    first: int
    end: int


class Decision(Record, frozen=True, kw_only=True):
    schema_file = "decision.avsc"

    run: str
    incarnation: int
    sequence: int
    version: int | None = None
    groups: list[DecidedGroup] = []
    others: list[Member] = []
    offsets: list[PartitionOffsets] = []
    needs: int | None = None
    skipped: list[SkippedRange] = []
    settings: Json = "{}"
    packing: Json = "{}"
    seed: int = 0
    created_at: int = 0
    topic: str = "rewarded"


class Outcome(Record, frozen=True, kw_only=True):
    schema_file = "outcome.avsc"

    run: str
    incarnation: int
    sequence: int
    version: int
    metrics: dict[str, float] = {}
    timings: dict[str, float] = {}
    created_at: int = 0
    batch: str = ""
    machine: Json = "{}"


RECORD_TYPES: tuple[type[Record], ...] = (
    Step,
    TrajectoryEnd,
    Feedback,
    StepNote,
    ScoredGroup,
    AtroposEvent,
    Registration,
    PolicyVersion,
    Decision,
    Outcome,
)
