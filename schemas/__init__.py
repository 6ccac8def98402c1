"""The records of the log: their Avro schemas, Python types and codec.

A record is a frozen struct (`Step`, `TrajectoryEnd`, …); a `Codec` turns it into the bytes of a Kafka
value and back. Token ids and logprobs stay packed in `bytes`; `packing` turns them into numbers.
"""

from schemas.codec import Codec, SchemaError, UnknownSchema
from schemas.records import (
    AtroposEvent,
    DecidedGroup,
    Decision,
    Feedback,
    Member,
    Outcome,
    PartitionOffsets,
    PolicyVersion,
    Position,
    Record,
    Registration,
    Reward,
    ScoredGroup,
    Segment,
    SkippedRange,
    Step,
    StepAdvantages,
    StepNote,
    TrajectoryEnd,
)

__all__ = [
    "AtroposEvent",
    "Codec",
    "DecidedGroup",
    "Decision",
    "Feedback",
    "Member",
    "Outcome",
    "PartitionOffsets",
    "PolicyVersion",
    "Position",
    "Record",
    "Registration",
    "Reward",
    "SchemaError",
    "ScoredGroup",
    "Segment",
    "SkippedRange",
    "Step",
    "StepAdvantages",
    "StepNote",
    "TrajectoryEnd",
    "UnknownSchema",
]
