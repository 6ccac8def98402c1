"""A log to export, and what an export says of it."""

from pathlib import Path
from typing import Any

import msgspec

from pool import topics
from pool.connection import Connection
from pool.core.trajectories import annotate
from pool.topics import REWARDED, STEPS
from replay.export.command import export
from replay.settings import DatasetExportSettings
from schemas import Position, Record, Reward, ScoredGroup, StepAdvantages
from schemas.packing import pack_doubles, pack_ids, pack_logprobs
from tests.pool.log import write
from tests.pool.records import end, feedback, note, step
from tests.pool.topic_content import conversation

POSITIONS = ("topic", "partition", "offset", "source_offset", "schema")
ADVANTAGE = StepAdvantages(step_id="r-1", values=pack_logprobs([0.5]))
STEP_POSITIONS = ("step_offset", "step_source_offset", "step_schema")


def fill(connection: Connection) -> None:
    """A conversation in `steps` and `rewarded`, an unanswered repetition, late and repeated Feedback, a
    Step that nobody received, a trajectory without Steps, a hole."""
    topics.create(connection, partitions=2)
    steps, _ = conversation(3)
    records: list[Record] = [
        *steps,
        end("t", steps=3, reward=0.5, metadata='{"task": "sums"}', group_size=2),
        step("r-0", "r", "q", request_hash=b"same", response=(6,)),
        step("r-1", "r", "q", request_hash=b"same", index=1, conversation=b"\x01", tenant="acme"),
        msgspec.structs.replace(note("r-0", delivered=False, trajectory="r"), prompt_uid="q"),
        feedback(0.25, "r", "q"),
        end("r", "q", steps=2, reward=1.0, channel="val", advantages=[ADVANTAGE]),
        end("empty", "q", steps=0, status="failed", reason="no engine"),
        step("hole-0", "hole", "q"),
        end("hole", "q", steps=2),
        feedback(2.0, "t", metadata='{"by": "a person"}'),
        feedback(3.0, "t"),
        feedback(3.0, "t"),
        feedback(0.75, "t", step_id="s1"),
    ]
    places = write(connection, STEPS, records)
    write(connection, REWARDED, [_rewarded(r, p) for r, p in zip(records, places, strict=True)])


def _rewarded(record: Record, place: Position) -> Record:
    extra: dict[str, Any] = {}
    if getattr(record, "end_id", "") == "end-t":
        opinion = Reward(name="exact", version="2", value=0.5, weight=1.0)
        extra = {"rewards": [opinion, Reward(name="judge", version="b", value=None)]}
    return annotate(record, place, **extra)


def posted() -> ScoredGroup:
    """Two sequences of five ids, with two turns of the model."""
    ids, mask = pack_ids((11, 12, 13, 14, 15)), pack_ids((-100, 12, 13, -100, 15))
    logprobs, advantages = (1.0, -0.5, -0.25, 1.0, -2.0), (9.0, 0.5, 1.5, 9.0, 2.5)
    return ScoredGroup(
        group_uid="g",
        prompt_uid="p",
        run="environments",
        sequence=1,
        tokens=[ids, ids],
        masks=[mask, mask],
        scores=[0.25, 0.75],
        advantages=[pack_doubles(advantages)] * 2,
        inference_logprobs=[pack_doubles(logprobs)] * 2,
    )


def exported(connection: Connection, into: Path, **settings: Any) -> list[dict[str, Any]]:
    """The rows, as JSON lines have them."""
    given = {**connection.model_dump(), "into": into, "topic": "steps", **settings}
    export(DatasetExportSettings(**given))
    files = sorted(into.glob("data-*")) if into.is_dir() else [into]
    if files[0].suffix == ".parquet":
        import pyarrow.parquet as pq

        return [row for file in files for row in pq.read_table(file).to_pylist()]
    return [msgspec.json.decode(line) for f in files for line in f.read_bytes().splitlines()]


def without_positions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bare = [_bare(row, (*POSITIONS, *STEP_POSITIONS)) for row in rows]
    for row in bare:
        if "steps" in row:
            row["steps"] = [_bare(step, STEP_POSITIONS) for step in row["steps"]]
    return sorted(bare, key=lambda row: (row["trajectory_uid"], row.get("step_index", 0)))


def _bare(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}
