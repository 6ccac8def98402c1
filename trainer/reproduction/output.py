"""The report of `steplog replay step`, as a JSON document and as lines of text."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from pool.readers.decision_batch import trained_members
from schemas import DecidedGroup
from trainer.data.sample import Sample
from trainer.reproduction.recorded_run import RebuiltBatch

if TYPE_CHECKING:  # it imports torch, which showing a batch does not need
    from trainer.reproduction.retraining import Retrained


def make_document(batch: RebuiltBatch, retrained: "Retrained | None") -> dict[str, Any]:
    decision, outcome = batch.decision, batch.outcome
    return {
        "run": decision.run,
        "version": decision.version,
        "decision": decision.sequence,
        "incarnation": decision.incarnation,
        "created_at": decision.created_at,
        "topic": decision.topic,
        "seed": decision.seed,
        "settings": json.loads(decision.settings),
        "groups": [_describe_group(batch, index) for index in range(len(batch.groups))],
        "lost": batch.lost,
        "batch": batch.digest,
        "recorded_batch": outcome.batch if outcome is not None else None,
        "same_batch": batch.is_same,
        "again": None if retrained is None else _describe_retrained(retrained),
    }


def _describe_group(rebuilt: RebuiltBatch, index: int) -> dict[str, Any]:
    group = rebuilt.groups[index]
    members = zip(rebuilt.batch.samples, rebuilt.batch.advantages, strict=True)
    return {
        "prompt_uid": group.prompt_uid,
        "partition": group.partition,
        "first_offset": group.first_offset,
        "members": [
            _describe_member(sample, advantage, group, rebuilt.batch.version)
            for sample, advantage in members
            if sample.group == index
        ],
    }


def _describe_member(
    sample: Sample, advantage: float, group: DecidedGroup, version: int
) -> dict[str, Any]:
    offsets = {member.trajectory_uid: member.offsets for member in trained_members(group)}
    versions = [row.versions[row.trainable] for row in sample.rows]
    oldest = min((int(part.min()) for part in versions if len(part)), default=None)
    return {
        "trajectory_uid": sample.trajectory_uid,
        "offsets": offsets[sample.trajectory_uid],
        "reward": sample.reward,
        "advantage": advantage,
        "turn_advantages": list(sample.turn_advantages) or None,
        "rows": len(sample.rows),
        "tokens": sum(map(len, sample.rows)),
        "trained_tokens": sum(int(np.count_nonzero(row.trainable)) for row in sample.rows),
        # Tokens sampled by the version before have age 0. The age of another run's tokens is unknown.
        "age": None if oldest is None or oldest >= version else version - 1 - oldest,
    }


def _describe_retrained(retrained: "Retrained") -> dict[str, Any]:
    return {
        "from_version": retrained.start,
        "machine": retrained.machine,
        "tolerance": retrained.tolerance,
        "metrics": {
            metric.name: {"recorded": metric.recorded, "reproduced": metric.reproduced}
            for metric in retrained.metrics
        },
        "other_weights": retrained.differing_weights,
        "same": retrained.is_same,
    }


def format_lines(batch: RebuiltBatch, retrained: "Retrained | None") -> Iterator[str]:
    document, loss, learner = make_document(batch, None), *batch.settings[:2]
    created = datetime.fromtimestamp(document["created_at"] / 1000, UTC).isoformat(" ", "seconds")
    yield (
        f"version {document['version']} of run {document['run']}: Decision {document['decision']}, "
        f"made {created} in incarnation {document['incarnation']}, seed {document['seed']}"
    )
    members = [member for group in document["groups"] for member in group["members"]]
    tokens, trained_tokens = (
        sum(m[name] for m in members) for name in ("tokens", "trained_tokens")
    )
    yield (
        f"{len(document['groups'])} groups of {document['topic']}, {len(members)} trajectories, "
        f"{tokens} tokens, {trained_tokens} of them trained"
    )
    if batch.lost:
        yield f"{batch.lost} more groups were decided, but lost or given up before they were trained"
    changed = loss.model_dump(exclude_defaults=True) | learner.model_dump(exclude_defaults=True)
    yield "settings: " + (", ".join(f"{n} {v}" for n, v in changed.items()) or "all defaults")
    for group in document["groups"]:
        yield f"  group {group['prompt_uid']}, partition {group['partition']}"
        yield from map(_format_member, group["members"])
    yield f"batch {batch.digest}: {_compare_digests(batch)}"
    if retrained is not None:
        yield from _format_retrained(retrained)


def _format_member(member: dict[str, Any]) -> str:
    age = "unknown" if member["age"] is None else member["age"]
    turns = ", ".join(f"{value:+.4g}" for value in member["turn_advantages"] or ())
    advantage = f"{member['advantage']:+.4g}" + (f" (by turn: {turns})" if turns else "")
    return (
        f"    {member['trajectory_uid']}  reward {member['reward']:g}  "
        f"advantage {advantage}  {member['trained_tokens']} of {member['tokens']} "
        f"tokens trained  age {age}"
    )


def _compare_digests(batch: RebuiltBatch) -> str:
    if batch.outcome is None:
        return "cannot be compared, since the version has no Outcome yet"
    if batch.is_same is None:
        return "cannot be compared, since the Outcome has no digest of its batch"
    if batch.is_same:
        return "bit for bit the batch that was trained"
    return f"NOT the batch that was trained, which is {batch.outcome.batch}"


def _format_retrained(retrained: "Retrained") -> Iterator[str]:
    start = f"checkpoint {retrained.start}" if retrained.start else "the initial model"
    width = max((len(metric.name) for metric in retrained.metrics), default=0)
    yield f"trained again from {start}:"
    for metric in retrained.metrics:
        mark = "" if metric.is_within(retrained.tolerance) else "  DIFFERS"
        value = "missing" if metric.reproduced is None else f"{metric.reproduced:.9g}"
        name, difference = f"{metric.name:<{width}}", f"{metric.difference:.2g}"
        yield f"  {name}  {metric.recorded:.9g}  again {value}  (difference {difference}){mark}"
    differing = retrained.differing_weights
    if differing is not None:
        weights = f"{differing} tensors differ from" if differing else "equal to"
        yield f"  weights: {weights} the checkpoint of this version"
    precision = f"within {retrained.tolerance:g}" if retrained.tolerance else "bit for bit"
    yield f"reproduced {precision}" if retrained.is_same else f"NOT reproduced {precision}"
