"""All trajectories: looking them up, opening, registering and closing them.

The topic `trajectories` says which trajectories exist. This process follows it, so that a call finds
its trajectory whichever process opened it. An unknown trajectory is registered. Once every record
before that registration has been read, either the trajectory was new, or another process registered it
first; then that process's Steps are read. A trajectory that was evicted from memory, or lost with a
process, is read back from `steps`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any

import msgspec

from gateway import metrics
from gateway.errors import BadRequest, Conflict, NotFound, TooMany, Unavailable
from gateway.state.admission import TRAIN, Admission
from gateway.state.completion import Completion, check_repeats, trajectory_end
from gateway.state.index import ClosedTrajectory, TrajectoryIndex
from gateway.state.log import StepsLog
from gateway.state.recovery import Recovery
from gateway.state.trajectory import TrajectoryState
from pool.readers.follower import Follower
from schemas import Record, Registration, TrajectoryEnd

log = logging.getLogger(__name__)

IDLE_S = 600.0
"""Seconds without a call after which a trajectory leaves memory; its next call reads it back."""
EVICT_EVERY_S = 30.0
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


class Trajectories:
    """The trajectories of all agents. `follower` is set once the topic is being followed."""

    def __init__(
        self, log: StepsLog, recovery: Recovery, admission: Admission, rules: TrajectoryRules
    ) -> None:
        self._log = log
        self._recovery = recovery
        self._admission = admission
        self._rules = rules
        self._index = TrajectoryIndex()
        self._in_memory: dict[str, TrajectoryState] = {}
        self._recovering: dict[str, asyncio.Task[TrajectoryState]] = {}
        self.follower: Follower | None = None
        metrics.admitted_groups.set_function(lambda: admission.groups_in_flight)

    def apply(self, record: Record) -> None:
        """Folds a record of `trajectories` written by another process, or before a restart."""
        self._admission.apply(record)
        if not isinstance(record, Registration):
            return
        merged = self._index.merge(record)
        trajectory = self._in_memory.get(record.trajectory_uid)
        if trajectory is not None and trajectory.registered:
            trajectory.registration = merged
            # A merge that moved the beginning must be written to the log.
            trajectory.registered = merged.begins == record.begins

    # Looking up and opening

    async def for_call(
        self, uid: str, prompt_uid: str, tenant: str, channel: str | None = None
    ) -> TrajectoryState:
        """The trajectory of a call; opens an unknown one, in this channel. Refuses a closed one."""
        trajectory = await self._get_or_open(uid, prompt_uid, tenant, channel)
        if trajectory.is_closed or trajectory.closing.locked():
            raise _completed(uid)
        if trajectory.registration.prompt_uid != prompt_uid:
            self._change_prompt(trajectory, prompt_uid, channel)
        return trajectory

    async def existing(self, uid: str, prompt_uid: str, tenant: str) -> TrajectoryState:
        """A trajectory that must exist, open or closed."""
        if uid not in self._in_memory and await self._registration(uid) is None:
            closed = self._index.closed(uid)
            if closed is None or closed.tenant != tenant:
                raise _not_found(uid)
            await self._recover_closed(self._closed_registration(uid, prompt_uid, closed))
        trajectory = await self._get_or_open(uid, prompt_uid, tenant)
        if trajectory.registration.prompt_uid != prompt_uid:
            raise NotFound(
                f"Trajectory {uid} does not belong to prompt {prompt_uid}. Use the base URL with "
                "which the trajectory was started."
            )
        return trajectory

    def _closed_registration(
        self, uid: str, prompt_uid: str, closed: ClosedTrajectory
    ) -> Registration:
        return Registration(
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            run=self._rules.run,
            tenant=closed.tenant,
            begins=closed.begins,
            status="completed",
        )

    async def _get_or_open(
        self, uid: str, prompt_uid: str, tenant: str, channel: str | None = None
    ) -> TrajectoryState:
        trajectory = self._in_memory.get(uid)
        if trajectory is None and (registration := self._index.open_registration(uid)) is not None:
            trajectory = await self._recover_once(registration)
        if trajectory is None:
            trajectory = self._open(uid, prompt_uid, tenant, channel)
        if trajectory.registration.tenant != tenant:
            raise _not_found(uid)
        trajectory.last_used = time.monotonic()
        return trajectory

    def _open(self, uid: str, prompt_uid: str, tenant: str, channel: str | None) -> TrajectoryState:
        closed = self._index.closed(uid)
        if closed is not None:
            raise _completed(uid) if closed.tenant == tenant else _not_found(uid)
        registration = self.new_registration(
            uid, prompt_uid, tenant, channel=channel, implicit=channel is None
        )
        trajectory = self._keep(TrajectoryState(registration))
        trajectory.explicit_fields |= {"channel": channel} if channel else {}
        return trajectory

    async def _registration(self, uid: str) -> Registration | None:
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
                f"Kafka did not answer within {FOLLOW_TIMEOUT_S:g} s. Retry the request."
            ) from None

    @property
    def _topic_follower(self) -> Follower:
        assert self.follower is not None
        return self.follower

    async def _recover_once(self, registration: Registration) -> TrajectoryState:
        """Recovers a trajectory; calls that arrive meanwhile wait for the same recovery."""
        uid = registration.trajectory_uid
        task = self._recovering.get(uid)
        if task is None:
            task = self._recovering[uid] = asyncio.create_task(self._recover(registration))
            task.add_done_callback(lambda _: self._recovering.pop(uid, None))
        return await asyncio.shield(task)

    async def _recover(self, registration: Registration) -> TrajectoryState:
        trajectory = TrajectoryState(registration)
        trajectory.registered = True
        trajectory.restore(await self._recovery.records(registration))
        metrics.recovered_trajectories.inc()
        return self._keep(trajectory)

    async def _recover_closed(self, registration: Registration) -> None:
        """Recovers a closed trajectory. Its registration is not kept; its End has the same fields."""
        trajectory = await self._recover_once(registration)
        if (end := trajectory.end) is not None:
            trajectory.registration = msgspec.structs.replace(
                registration,
                prompt_uid=end.prompt_uid,
                run=end.run,
                channel=end.channel,
                metadata=end.metadata,
                group_size=end.group_size,
                status=end.status,
            )

    def _keep(self, trajectory: TrajectoryState) -> TrajectoryState:
        self._in_memory[trajectory.uid] = trajectory
        metrics.open_trajectories.set(len(self._in_memory))
        return trajectory

    def _change_prompt(
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
        self._admit(trajectory.uid, channel or trajectory.registration.channel, prompt_uid)
        begins = self._log.end_before(prompt_uid)
        trajectory.registration = self._changed(trajectory, prompt_uid=prompt_uid, begins=begins)
        trajectory.registered = False

    def _changed(self, trajectory: TrajectoryState, **changes: Any) -> Registration:
        return msgspec.structs.replace(
            trajectory.registration, gateway=self._rules.gateway, **changes
        )

    # Registering

    def new_registration(
        self, uid: str, prompt_uid: str, tenant: str, **fields: Any
    ) -> Registration:
        """The registration of a trajectory, if it may begin now. Nothing is written yet."""
        channel = fields.get("channel") or TRAIN
        self._check_open_trajectories(tenant)
        self._admit(uid, channel, prompt_uid)
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

    def _admit(self, uid: str, channel: str, prompt_uid: str) -> None:
        if channel != TRAIN:
            return
        if not self._admission.admits(prompt_uid):
            metrics.refused_groups.inc()
            raise TooMany(
                f"Too many groups in flight (limit {self._admission.limit}). Retry this prompt after "
                "the trainer has decided one of them.",
                code="too_many_groups",
            )
        self._admission.expect(uid, prompt_uid)

    def _check_open_trajectories(self, tenant: str) -> None:
        limit = self._rules.max_open_trajectories
        if self._index.open_count(tenant) >= limit:
            raise TooMany(
                f"Too many open trajectories (limit {limit}). Complete some of them, then retry."
            )

    async def begin(self, registration: Registration) -> TrajectoryState:
        """Registers a trajectory before its first call."""
        trajectory = TrajectoryState(registration)
        await self.ensure_registered(trajectory)
        return self._keep(trajectory)

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
                raise _completed(uid)
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
            raise _completed(trajectory.uid)
        registration = trajectory.registration
        if changes.get("channel") == TRAIN != registration.channel:
            self._admit(trajectory.uid, TRAIN, registration.prompt_uid)
        trajectory.explicit_fields |= changes
        trajectory.registration = self._changed(trajectory, implicit=False, **changes)
        trajectory.registered = False
        await self.ensure_registered(trajectory)

    # Closing

    async def complete(self, trajectory: TrajectoryState, completion: Completion) -> None:
        """Waits for running calls, then closes. Repeating the same completion is no error."""
        if trajectory.end is None:
            async with trajectory.closing:
                while trajectory.running:
                    await asyncio.wait([call.task for call in trajectory.running])
                if trajectory.end is None and trajectory.is_closed:
                    trajectory.end = await self._find_end(trajectory)
                if trajectory.end is None:
                    end = trajectory_end(trajectory, completion)
                    await self._log.write(end)
                    trajectory.end = end
        check_repeats(trajectory.end, completion)
        await self._register_closed(trajectory, trajectory.end)

    async def _find_end(self, trajectory: TrajectoryState) -> TrajectoryEnd | None:
        """The End that another process has written."""
        records = await self._recovery.records(trajectory.registration)
        return next((record for record in records if isinstance(record, TrajectoryEnd)), None)

    async def _register_closed(self, trajectory: TrajectoryState, end: TrajectoryEnd) -> None:
        if trajectory.registration.status is not None:
            return
        closed = self._changed(trajectory, status=end.status)
        self._topic_follower.note_own(await self._log.register(closed))
        trajectory.registration = closed
        self._admission.apply(closed)
        self._index.put(closed)

    # Eviction

    async def evict_forever(self) -> None:
        while True:
            await asyncio.sleep(EVICT_EVERY_S)
            self._evict(time.monotonic(), time.time())

    def _evict(self, monotonic: float, now: float) -> None:
        """Drops idle trajectories, which can be read back, and ones abandoned long ago."""
        idle = [
            uid
            for uid, trajectory in self._in_memory.items()
            if not trajectory.running and monotonic - trajectory.last_used > IDLE_S
        ]
        for uid in idle:
            del self._in_memory[uid]
        self._index.forget_abandoned(now)
        metrics.open_trajectories.set(len(self._in_memory))


def _completed(uid: str) -> Conflict:
    return Conflict(
        f"Trajectory {uid} is already completed. Start a new trajectory for further calls."
    )


def _not_found(uid: str) -> NotFound:
    return NotFound(
        f"Trajectory {uid} does not exist. A trajectory begins with POST /init_trajectory or with its "
        "first call."
    )


def _mark_retrieved(task: "asyncio.Task[None]") -> None:
    """Keeps asyncio from warning about a failure that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
