"""Messages between the worker and its scoring processes: trajectories there, results back.

They are msgpack, in batches: a message per trajectory would cost more than most functions do.
"""

import msgspec

from pool.core.progress import Received
from pool.core.trajectories import Trajectory, TrajectoryAssembler
from reward.scoring.results import FunctionResult
from schemas import Feedback, Step, StepNote, TrajectoryEnd

RECORD_TYPES: tuple[type[Step] | type[StepNote] | type[Feedback] | type[TrajectoryEnd], ...] = (
    Step,
    StepNote,
    Feedback,
    TrajectoryEnd,
)


class PackedRecord(msgspec.Struct, array_like=True):
    type_index: int
    """Into RECORD_TYPES."""
    record: msgspec.Raw
    partition: int
    offset: int


class ScoringRequest(msgspec.Struct, array_like=True):
    """One trajectory to score, with the number by which the worker knows it."""

    number: int
    records: list[PackedRecord]


class ScoringResult(msgspec.Struct, array_like=True):
    """The results of all functions on the trajectory with this number."""

    number: int
    results: list[FunctionResult]
    seconds: list[float]
    """The time that each function took."""


encode = msgspec.msgpack.Encoder().encode
decode_requests = msgspec.msgpack.Decoder(list[ScoringRequest]).decode
decode_results = msgspec.msgpack.Decoder(list[ScoringResult]).decode
_decode_record = [msgspec.msgpack.Decoder(kind).decode for kind in RECORD_TYPES]


def pack(number: int, trajectory: Trajectory) -> ScoringRequest:
    records = [
        PackedRecord(
            RECORD_TYPES.index(type(received.record)),
            msgspec.Raw(encode(received.record)),
            received.partition,
            received.offset,
        )
        for received in trajectory.records
    ]
    return ScoringRequest(number, records)


def unpack(request: ScoringRequest) -> Trajectory:
    assembler = TrajectoryAssembler()
    for packed in request.records:
        record = _decode_record[packed.type_index](packed.record)
        item = assembler.feed(Received(record, packed.partition, packed.offset))
    assert isinstance(item, Trajectory)
    return item
