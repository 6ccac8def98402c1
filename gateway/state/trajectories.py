"""All trajectories: looking them up, opening and closing them.

The topic `trajectories` says which trajectories exist. This process follows it, so that a call finds
its trajectory whichever process opened it. An unknown trajectory is opened and registered. One that
was evicted from memory, or lost with a process, is read back from `steps`.
"""

import asyncio
import time

import msgspec

from gateway import metrics
from gateway.errors import NotFound
from gateway.state.admission import Admission
from gateway.state.completion import Completion, check_repeats, trajectory_end
from gateway.state.index import ClosedTrajectory, TrajectoryIndex
from gateway.state.log import StepsLog
from gateway.state.notes import delivery_note
from gateway.state.recovery import Recovery
from gateway.state.registrar import Registrar, TrajectoryRules, completed_error
from gateway.state.trajectory import TrajectoryState
from schemas import Record, Registration, TrajectoryEnd

IDLE_S = 600.0
"""Seconds without a call after which a trajectory leaves memory; its next call reads it back."""
EVICT_EVERY_S = 30.0
CLOCK_DIFFERENCE_MS = 60_000
"""How far the clock of the reward worker, which ends overdue trajectories, may be ahead of ours."""


class Trajectories:
    """The trajectories of all agents: those in memory, and how the others get there."""

    def __init__(
        self, log: StepsLog, recovery: Recovery, admission: Admission, rules: TrajectoryRules
    ) -> None:
        self._log = log
        self._recovery = recovery
        self._admission = admission
        self._rules = rules
        self._index = TrajectoryIndex()
        self.registrar = Registrar(log, recovery, admission, self._index, rules)
        self._in_memory: dict[str, TrajectoryState] = {}
        self._recovering: dict[str, asyncio.Task[TrajectoryState]] = {}
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
        self,
        uid: str,
        prompt_uid: str,
        tenant: str,
        channel: str | None = None,
        metadata: str | None = None,
    ) -> TrajectoryState:
        """The trajectory of a call; opens an unknown one, with this channel and metadata. Refuses a
        closed one."""
        trajectory = await self._get_or_open(uid, prompt_uid, tenant, channel, metadata)
        if trajectory.is_closed or trajectory.closing.locked():
            raise completed_error(uid)
        if trajectory.registration.prompt_uid != prompt_uid:
            self.registrar.change_prompt(trajectory, prompt_uid, channel)
        return trajectory

    async def existing(self, uid: str, prompt_uid: str, tenant: str) -> TrajectoryState:
        """A trajectory that must exist, open or closed."""
        if uid not in self._in_memory and await self.registrar.find(uid) is None:
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
        self,
        uid: str,
        prompt_uid: str,
        tenant: str,
        channel: str | None = None,
        metadata: str | None = None,
    ) -> TrajectoryState:
        trajectory = self._in_memory.get(uid)
        if trajectory is None and (registration := self._index.open_registration(uid)) is not None:
            trajectory = await self._recover_once(registration)
        if trajectory is None:
            trajectory = self._open(uid, prompt_uid, tenant, channel, metadata)
        if trajectory.registration.tenant != tenant:
            raise _not_found(uid)
        trajectory.last_used = time.monotonic()
        return trajectory

    def _open(
        self, uid: str, prompt_uid: str, tenant: str, channel: str | None, metadata: str | None
    ) -> TrajectoryState:
        closed = self._index.closed(uid)
        if closed is not None:
            raise completed_error(uid) if closed.tenant == tenant else _not_found(uid)
        registration = self.registrar.new_registration(
            uid, prompt_uid, tenant, channel=channel, metadata=metadata, implicit=channel is None
        )
        trajectory = self._keep(TrajectoryState(registration))
        trajectory.explicit_fields |= {"channel": channel} if channel else {}
        return trajectory

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

    async def read_again(self, trajectory: TrajectoryState) -> None:
        """Adds what other processes have written since; refuses a trajectory that is closed by now."""
        read_at = time.monotonic()
        trajectory.restore(await self._recovery.records(trajectory.registration))
        trajectory.read_at = read_at
        if trajectory.is_closed:
            raise completed_error(trajectory.uid)

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

    async def begin(self, registration: Registration) -> TrajectoryState:
        """Registers a trajectory before its first call."""
        trajectory = TrajectoryState(registration)
        await self.registrar.ensure_registered(trajectory)
        return self._keep(trajectory)

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
                    trajectory.end = await self._write_end(trajectory, completion)
        check_repeats(trajectory.end, completion)
        await self.registrar.register_closed(trajectory, trajectory.end)

    async def _write_end(
        self, trajectory: TrajectoryState, completion: Completion
    ) -> TrajectoryEnd:
        """Clients got an error for the Steps that could not be written. The log may have them, so that
        a note must say that they were not delivered."""
        for step in trajectory.unwritten_steps():
            await self._log.write(delivery_note(step, delivered=False))
        end = trajectory_end(trajectory, completion)
        await self._log.write(end)
        return await self._first_end(trajectory, end)

    async def _first_end(
        self, trajectory: TrajectoryState, written: TrajectoryEnd
    ) -> TrajectoryEnd:
        """The End that counts, after one was written. Near its deadline a trajectory may have expired
        before: the first End holds, and the client must not hear that its own did."""
        deadline = trajectory.registration.deadline
        if deadline is None or time.time() * 1000 < deadline - CLOCK_DIFFERENCE_MS:
            return written
        return await self._find_end(trajectory) or written

    async def _find_end(self, trajectory: TrajectoryState) -> TrajectoryEnd | None:
        """The first End that the log has."""
        records = await self._recovery.records(trajectory.registration)
        return next((record for record in records if isinstance(record, TrajectoryEnd)), None)

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


def _not_found(uid: str) -> NotFound:
    return NotFound(
        f"Trajectory {uid} does not exist. A trajectory begins with POST /init_trajectory or with its "
        "first call."
    )
