"""Registers trajectories: writes their registrations, at most one write per trajectory at a time.

A trajectory may be registered by several gateway processes at once. After writing its registration,
a process makes sure that it has read every record before it. If another process was first, its
registration holds, and its Steps are read."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import msgspec

from gateway import metrics
from gateway.errors import BadRequest, Conflict, TooMany, Unavailable
from gateway.state.admission import TRAIN, Admission
from gateway.state.index import TrajectoryIndex
from gateway.state.log import StepsLog
from gateway.state.recovery import Recovery
from gateway.state.trajectory import TrajectoryState
from pool.core.shares import read_share
from pool.core.trajectories import status_of
from pool.readers.follower import Follower
from schemas import Registration, TrajectoryEnd

FOLLOW_TIMEOUT_S = 10.0
"""Seconds to wait until a record written to `trajectories` has been read back."""


class TrajectoryRules(msgspec.Struct, frozen=True):
    """Defaults and limits for every trajectory that this process opens."""

    run: str
    gateway: str
    """The name of this process."""
    group_size: int
    deadline_s: float
    max_open_trajectories: int


class Registrar:
    """Writes registrations. `follower` is set once the topic `trajectories` is being followed."""

    def __init__(
        self,
        log: StepsLog,
        recovery: Recovery,
        admission: Admission,
        index: TrajectoryIndex,
        rules: TrajectoryRules,
    ) -> None:
        self.follower: Follower | None = None
        self._log = log
        self._recovery = recovery
        self._admission = admission
        self._index = index
        self._rules = rules

    def new_registration(
        self, uid: str, prompt_uid: str, tenant: str, **fields: Any
    ) -> Registration:
        """The registration of a trajectory, if it may begin now. Nothing is written yet."""
        channel = fields.get("channel") or TRAIN
        self._check_open_trajectories(tenant)
        self._admit(uid, channel, prompt_uid, fields.get("metadata") or "{}")
        now = time.time()
        deadline_s = fields.get("deadline_s") or self._rules.deadline_s
        return Registration(
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            run=self._rules.run,
            channel=channel,
            metadata=fields.get("metadata") or "{}",
            group_size=fields.get("group_size") or self._rules.group_size,
            deadline=int((now + deadline_s) * 1000),
            tenant=tenant,
            gateway=self._rules.gateway,
            implicit=fields.get("implicit", False),
            begins=self._log.end_before(prompt_uid),
            created_at=int(now * 1000),
        )

    def _admit(self, uid: str, channel: str, prompt_uid: str, metadata: str) -> None:
        if channel != TRAIN:
            return
        share = read_share(metadata)
        if not self._admission.admits(prompt_uid, share):
            metrics.refused_groups.inc()
            total, own = self._admission.limit, self._admission.limit_of(share)
            part = f", of which {own} for {share.environment or 'others'}" if own != total else ""
            raise TooMany(
                f"Too many groups in flight (limit {total}{part}). Retry this prompt after the trainer "
                "has decided one of them.",
                code="too_many_groups",
                wait_s=self._admission.expected_wait(),
            )
        self._admission.expect(uid, prompt_uid, share)

    def _check_open_trajectories(self, tenant: str) -> None:
        limit = self._rules.max_open_trajectories
        if self._index.open_count(tenant) >= limit:
            raise TooMany(
                f"Too many open trajectories (limit {limit}). Complete some of them, then retry.",
                wait_s=self._index.expected_wait(tenant),
            )

    async def ensure_registered(self, trajectory: TrajectoryState) -> None:
        """Returns when the log has the registration."""
        while not trajectory.registered:
            await asyncio.shield(self.start_registering(trajectory))

    def start_registering(self, trajectory: TrajectoryState) -> "asyncio.Task[None]":
        """Starts writing the registration; calls that need it share one write."""
        if trajectory.registering is None:
            trajectory.registering = asyncio.create_task(self._register(trajectory))
            trajectory.registering.add_done_callback(_mark_retrieved)
        return trajectory.registering

    async def _register(self, trajectory: TrajectoryState) -> None:
        uid, registration = trajectory.uid, trajectory.registration
        try:
            position = await self._log.register(registration)
            if not self._topic_follower.note_own(position):
                await self._with_timeout(self._topic_follower.wait_until_seen(position))
            if self._index.closed(uid) is not None:
                raise completed_error(uid)
            earlier = self._index.open_registration(uid)
            if earlier is not None and earlier.gateway != self._rules.gateway:
                await self._adopt(trajectory, earlier)
                return  # `ensure_registered` writes the merged registration
        except Exception:
            self._admission.forget(uid)
            raise
        finally:
            trajectory.registering = None
        self._admission.apply(registration)
        self._index.put(registration)
        # It may have been changed while it was being written.
        trajectory.registered = trajectory.registration is registration

    async def _adopt(self, trajectory: TrajectoryState, earlier: Registration) -> None:
        """Takes over a trajectory that another process registered first: its registration holds,
        and its Steps come before ours."""
        trajectory.adopt_earlier(await self._recovery.records(earlier))
        trajectory.registration = msgspec.structs.replace(
            earlier, gateway=self._rules.gateway, **trajectory.explicit_fields
        )
        self._index.put(trajectory.registration)

    async def change(self, trajectory: TrajectoryState, **changes: Any) -> None:
        """Changes the registration, for instance channel or metadata, for all later Steps."""
        if trajectory.is_closed:
            raise completed_error(trajectory.uid)
        registration = trajectory.registration
        if changes.get("channel") == TRAIN != registration.channel:
            metadata = changes.get("metadata", registration.metadata)
            self._admit(trajectory.uid, TRAIN, registration.prompt_uid, metadata)
        trajectory.explicit_fields |= changes
        trajectory.registration = self._changed(trajectory, implicit=False, **changes)
        trajectory.registered = False
        await self.ensure_registered(trajectory)

    def change_prompt(
        self, trajectory: TrajectoryState, prompt_uid: str, channel: str | None
    ) -> None:
        """Moves a trajectory without calls to another prompt: clients may put their own prompt_uid into
        the base URL that they were given."""
        if trajectory.step_count or trajectory.running:
            raise BadRequest(
                f"Trajectory {trajectory.uid} belongs to prompt "
                f"{trajectory.registration.prompt_uid}, not {prompt_uid}: the prompt in the URL must "
                "not change after the first call."
            )
        registration = trajectory.registration
        self._admit(
            trajectory.uid, channel or registration.channel, prompt_uid, registration.metadata
        )
        begins = self._log.end_before(prompt_uid)
        trajectory.registration = self._changed(trajectory, prompt_uid=prompt_uid, begins=begins)
        trajectory.registered = False

    async def register_closed(self, trajectory: TrajectoryState, end: TrajectoryEnd) -> None:
        """Registers that the trajectory is closed, unless the log has that already."""
        if trajectory.registration.status is not None:
            return
        closed = self._changed(trajectory, status=status_of(end, trajectory.overflowed))
        self._topic_follower.note_own(await self._log.register(closed))
        trajectory.registration = closed
        self._admission.apply(closed)
        self._index.put(closed)

    async def find(self, uid: str) -> Registration | None:
        """The registration of an open trajectory, after reading `trajectories` to its end."""
        if self._index.open_registration(uid) is None and self._index.closed(uid) is None:
            await self._with_timeout(self._topic_follower.sync())
        return self._index.open_registration(uid)

    async def _with_timeout(self, following: Awaitable[None]) -> None:
        """A follower waits for Kafka as long as it takes; clients do not."""
        try:
            async with asyncio.timeout(FOLLOW_TIMEOUT_S):
                await following
        except TimeoutError:
            raise Unavailable(
                f"Kafka did not answer within {FOLLOW_TIMEOUT_S:g} s. Retry the request.",
                wait_s=FOLLOW_TIMEOUT_S,
            ) from None

    @property
    def _topic_follower(self) -> Follower:
        assert self.follower is not None
        return self.follower

    def _changed(self, trajectory: TrajectoryState, **changes: Any) -> Registration:
        return msgspec.structs.replace(
            trajectory.registration, gateway=self._rules.gateway, **changes
        )


def completed_error(uid: str) -> Conflict:
    return Conflict(
        f"Trajectory {uid} is already completed. Start a new trajectory for further calls."
    )


def _mark_retrieved(task: "asyncio.Task[None]") -> None:
    """Keeps asyncio from warning about a failure that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
