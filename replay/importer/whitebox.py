"""Reads dumps of white-box agents: each line is a body of `/submit_steps`, or a single Step of one.

The Steps of a trajectory may be any number of lines apart; the one with `is_last` completes it. A
trajectory without such a Step is imported as cancelled, so it is never trained.
"""

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from pool.core.submitted_steps import SubmittedStep, end_id, step_id
from replay.dataset.rows import FORMAT, ExportedTrajectory, StepRow, TrajectoryRow
from replay.importer.records import BadRow
from schemas import Segment
from schemas.packing import pack_ids, pack_logprobs
from schemas.records import Status

UNENDED = "the dump has no Step of it with is_last"


class WhiteboxDump:
    """The open trajectories of a dump."""

    def __init__(self, run: str | None, channel: str) -> None:
        self._run = run
        self._channel = channel
        self._open: dict[str, list[SubmittedStep]] = {}

    def add(self, line: dict[str, Any]) -> Iterator[ExportedTrajectory]:
        """Yields the trajectories that the line completes."""
        if self._run is None:
            raise BadRow("a white-box dump does not name its run: give it with --run")
        for step in msgspec.convert(line.get("steps", [line]), list[SubmittedStep]):
            steps = self._open.setdefault(step.trajectory_uid, [])
            if steps and steps[0].prompt_uid != step.prompt_uid:
                raise BadRow(f"trajectory {step.trajectory_uid} has two prompt_uids")
            steps.append(step)
            if step.is_last:
                yield self._exported(self._open.pop(step.trajectory_uid), "completed", None)

    def unended(self) -> Iterator[ExportedTrajectory]:
        for steps in self._open.values():
            yield self._exported(steps, "cancelled", UNENDED)

    def _exported(
        self, steps: list[SubmittedStep], status: Status, reason: str | None
    ) -> ExportedTrajectory:
        rows = {row.step_id: row for row in map(_row, sorted(steps, key=lambda s: s.step_index))}
        first = steps[0]
        trajectory = TrajectoryRow(
            format=FORMAT,
            trajectory_uid=first.trajectory_uid,
            prompt_uid=first.prompt_uid,
            run=self._run or "",
            channel=self._channel,
            status=status,
            reason=reason,
            end_id=end_id(first.trajectory_uid),
            created_at=_now_ms(),
            trajectory_steps=len(rows),
        )
        return ExportedTrajectory(trajectory, list(rows.values()))


def _row(step: SubmittedStep) -> StepRow:
    prompt, response = pack_ids(step.prompt_ids), pack_ids(step.response_ids)
    logprobs = step.rollout_log_probs
    return StepRow(
        step_id=step_id(step.trajectory_uid, step.step_index, prompt, response),
        step_index=step.step_index,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=pack_logprobs(logprobs or [math.nan] * len(step.response_ids)),
        segments=[Segment(incarnation=0, version=step.policy_version, first_token=0)],
        sampling=step.stored_sampling,
        step_reward=step.reward,
        step_metadata=json.dumps(step.metadata or {}),
        not_trainable=step.not_trainable,
        is_last=step.is_last,
        step_created_at=_now_ms(),
    )


def _now_ms() -> int:
    return int(time.time() * 1000)
