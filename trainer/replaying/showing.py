"""A version's making, for people and for machines."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from pool.readers.decision_batch import trained_members
from schemas import DecidedGroup
from trainer.data.sample import Sample
from trainer.replaying.past import Rebuilt

if TYPE_CHECKING:  # it brings torch, which a batch alone does not need
    from trainer.replaying.again import Again


def document(rebuilt: Rebuilt, again: "Again | None") -> dict[str, Any]:
    decision, outcome = rebuilt.decision, rebuilt.outcome
    return {
        "run": decision.run,
        "version": decision.version,
        "decision": decision.sequence,
        "incarnation": decision.incarnation,
        "created_at": decision.created_at,
        "topic": decision.topic,
        "seed": decision.seed,
        "settings": json.loads(decision.settings),
        "groups": [_group(rebuilt, place) for place in range(len(rebuilt.groups))],
        "lost": rebuilt.lost,
        "batch": rebuilt.digest,
        "recorded_batch": outcome.batch if outcome is not None else None,
        "same_batch": rebuilt.same,
        "again": None if again is None else _again(again),
    }


def _group(rebuilt: Rebuilt, place: int) -> dict[str, Any]:
    group = rebuilt.groups[place]
    members = zip(rebuilt.batch.samples, rebuilt.batch.advantages, strict=True)
    return {
        "prompt_uid": group.prompt_uid,
        "partition": group.partition,
        "first_offset": group.first_offset,
        "members": [
            _member(sample, advantage, group, rebuilt.batch.version)
            for sample, advantage in members
            if sample.group == place
        ],
    }


def _member(sample: Sample, advantage: float, group: DecidedGroup, version: int) -> dict[str, Any]:
    named = {member.trajectory_uid: member.offsets for member in trained_members(group)}
    versions = [row.versions[row.trainable] for row in sample.rows]
    oldest = min((int(part.min()) for part in versions if len(part)), default=None)
    return {
        "trajectory_uid": sample.trajectory_uid,
        "offsets": named[sample.trajectory_uid],
        "reward": sample.reward,
        "advantage": advantage,
        "rows": len(sample.rows),
        "tokens": sum(map(len, sample.rows)),
        "trained_tokens": sum(int(np.count_nonzero(row.trainable)) for row in sample.rows),
        # Tokens of the version before are of age 0; of another run nobody knows it.
        "age": None if oldest is None or oldest >= version else version - 1 - oldest,
    }


def _again(again: "Again") -> dict[str, Any]:
    return {
        "from_version": again.began,
        "machine": again.machine,
        "tolerance": again.tolerance,
        "metrics": {
            one.name: {"recorded": one.recorded, "reproduced": one.reproduced}
            for one in again.compared
        },
        "other_weights": again.other_weights,
        "same": again.same,
    }


def lines(rebuilt: Rebuilt, again: "Again | None") -> Iterator[str]:
    told, loss, learner = document(rebuilt, None), *rebuilt.made_with[:2]
    made = datetime.fromtimestamp(told["created_at"] / 1000, UTC).isoformat(" ", "seconds")
    yield (
        f"version {told['version']} of run {told['run']}: Decision {told['decision']}, "
        f"made {made} in life {told['incarnation']}, seed {told['seed']}"
    )
    members = [member for group in told["groups"] for member in group["members"]]
    tokens, counted = (sum(m[name] for m in members) for name in ("tokens", "trained_tokens"))
    yield (
        f"{len(told['groups'])} groups of {told['topic']}, {len(members)} trajectories, "
        f"{tokens} tokens, {counted} of them trained"
    )
    if rebuilt.lost:
        yield f"{rebuilt.lost} more were decided, and lost before they were trained"
    changed = loss.model_dump(exclude_defaults=True) | learner.model_dump(exclude_defaults=True)
    yield "settings: " + (", ".join(f"{n} {v}" for n, v in changed.items()) or "the defaults")
    for group in told["groups"]:
        yield f"  group {group['prompt_uid']}, partition {group['partition']}"
        yield from map(_member_line, group["members"])
    yield f"batch {rebuilt.digest}: {_same_batch(rebuilt)}"
    if again is not None:
        yield from _again_lines(again)


def _member_line(member: dict[str, Any]) -> str:
    age = "unknown" if member["age"] is None else member["age"]
    return (
        f"    {member['trajectory_uid']}  reward {member['reward']:g}  "
        f"advantage {member['advantage']:+.4g}  {member['trained_tokens']} of {member['tokens']} "
        f"tokens trained  age {age}"
    )


def _same_batch(rebuilt: Rebuilt) -> str:
    if rebuilt.outcome is None:
        return "it has no Outcome yet, so nothing says what was trained"
    if rebuilt.same is None:
        return "its Outcome does not say what was trained"
    return (
        "bit for bit what was trained"
        if rebuilt.same
        else (f"NOT what was trained, which was {rebuilt.outcome.batch}")
    )


def _again_lines(again: "Again") -> Iterator[str]:
    start = f"checkpoint {again.began}" if again.began else "the model"
    width = max((len(one.name) for one in again.compared), default=0)
    yield f"trained again from {start}:"
    for one in again.compared:
        mark = "" if one.is_within(again.tolerance) else "  DIFFERS"
        again_ = "nothing" if one.reproduced is None else f"{one.reproduced:.9g}"
        difference = f"{one.difference:.2g}"
        yield f"  {one.name:<{width}}  {one.recorded:.9g}  again {again_}  ({difference}){mark}"
    if again.other_weights is not None:
        weights = f"{again.other_weights} tensors differ from" if again.other_weights else "equal"
        yield f"  weights: {weights} those of the version's own checkpoint"
    how = f"within {again.tolerance:g}" if again.tolerance else "bit for bit"
    yield f"reproduced {how}" if again.same else f"NOT reproduced {how}"
