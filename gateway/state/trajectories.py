"""All trajectories: who they are, where their Steps begin, and how they open and close.

`trajectories` in the log says which exist; this process follows it, so that a call finds its
trajectory whichever process opened it. A trajectory that is not known is registered; when all that
lies before that registration has been seen, it was new indeed, or another process had it first and
its Steps are read. What was evicted, or lost with a process, comes back from `steps`.
"""

import asyncio
import hashlib
import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable
from typing import Any, NamedTuple

import msgspec

from gateway import metrics
from gateway.errors import BadRequest, Conflict, NotFound, TooMany, Unavailable
from gateway.state.admission import TRAIN, Admission
from gateway.state.log import Log
from gateway.state.recovery import Recovery
from gateway.state.trajectory import Trajectory
from pool.readers.follower import Follower
from schemas import Position, Record, Registration, TrajectoryEnd
from schemas.records import Status

log = logging.getLogger(__name__)

IDLE = 600.0
"""Seconds without a call after which a trajectory leaves memory; its next call reads it back."""
REMEMBERED_CLOSED = 500_000
"""Closed trajectories that are known as such."""
TIDY_EVERY = 30.0
FOLLOW_LIMIT = 10.0
"""Seconds for what was written to `trajectories` to be read."""
FORGET_AFTER = 24 * 3600
"""Seconds after its deadline at which an abandoned trajectory is forgotten here."""
ENDS = uuid.UUID("6a1d0c1e-9a0e-4f3c-8f57-2a8a3a1f9d10")
"""Name space of the ids of TrajectoryEnds: an equal one that is written again is folded."""


class Trajectories:
    """`follower` is set once the topic is being followed."""

    def __init__(self, log: Log, recovery: Recovery, admission: Admission, rules: "Rules") -> None:
        self._log = log
        self._recovery = recovery
        self._admission = admission
        self._rules = rules
        self._held: dict[str, Trajectory] = {}
        self._entering: dict[str, asyncio.Task[Trajectory]] = {}
        self._known: dict[str, Registration] = {}
        self._open_of: Counter[str] = Counter()
        self._closed: OrderedDict[bytes, Closed] = OrderedDict()
        self.follower: Follower | None = None
        metrics.admitted_groups.set_function(lambda: admission.groups)

    # What the log says

    def apply(self, record: Record) -> None:
        """Folds a record of `trajectories` that another process wrote, or an earlier life of this."""
        self._admission.apply(record)
        if isinstance(record, Registration):
            self._hear(record)

    def _hear(self, record: Registration) -> None:
        known = self._known.get(record.trajectory_uid)
        merged = record if known is None else _merge(known, record)
        self._note(merged)
        held = self._held.get(record.trajectory_uid)
        if held is not None and held.registered:
            held.registration = merged
            held.registered = merged.begins == record.begins  # else the log must be told

    def _note(self, record: Registration) -> None:
        uid, tenant = record.trajectory_uid, record.tenant
        known = self._known.pop(uid, None)
        if known is not None:
            self._open_of[known.tenant] -= 1
        if record.status is None:
            self._known[uid] = record
            self._open_of[tenant] += 1
            return
        self._closed[_digest(uid)] = Closed(record.begins, tenant)
        while len(self._closed) > REMEMBERED_CLOSED:
            self._closed.popitem(last=False)

    # Opening

    async def for_call(
        self, uid: str, prompt_uid: str, tenant: str, channel: str | None = None
    ) -> Trajectory:
        """The trajectory of a call; opens an unknown one, in this channel. Refuses a closed one."""
        trajectory = await self._enter(uid, prompt_uid, tenant, channel)
        if trajectory.is_closed or trajectory.closing.locked():
            raise Conflict(f"trajectory {uid} is completed; a call must open a new one")
        if trajectory.registration.prompt_uid != prompt_uid:
            self._change_prompt(trajectory, prompt_uid, channel)
        return trajectory

    async def existing(self, uid: str, prompt_uid: str, tenant: str) -> Trajectory:
        """A trajectory that must be there, open or closed."""
        if uid not in self._held and await self._registration(uid) is None:
            closed = self._closed.get(_digest(uid))
            if closed is None or closed.tenant != tenant:
                raise NotFound(f"there is no trajectory {uid}")
            await self._recover_closed(self._closed_registration(uid, prompt_uid, closed))
        trajectory = await self._enter(uid, prompt_uid, tenant)
        if trajectory.registration.prompt_uid != prompt_uid:
            raise NotFound(f"there is no trajectory {uid} of prompt {prompt_uid}")
        return trajectory

    def _closed_registration(self, uid: str, prompt_uid: str, closed: "Closed") -> Registration:
        return Registration(
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            run=self._rules.run,
            tenant=closed.tenant,
            begins=closed.begins,
            status="completed",
        )

    async def _enter(
        self, uid: str, prompt_uid: str, tenant: str, channel: str | None = None
    ) -> Trajectory:
        trajectory = self._held.get(uid)
        if trajectory is None and uid in self._known:
            trajectory = await self._recover_once(self._known[uid])
        if trajectory is None:
            closed = self._closed.get(_digest(uid))
            if closed is not None and closed.tenant == tenant:
                raise Conflict(f"trajectory {uid} is completed; a call must open a new one")
            if closed is not None:
                raise NotFound(f"there is no trajectory {uid}")
            registration = self.new_registration(
                uid, prompt_uid, tenant, channel=channel, implicit=channel is None
            )
            trajectory = self._hold(Trajectory(registration))
            trajectory.wishes |= {"channel": channel} if channel else {}
        if trajectory.registration.tenant != tenant:
            raise NotFound(f"there is no trajectory {uid}")
        trajectory.last_used = time.monotonic()
        return trajectory

    async def _recover_once(self, registration: Registration) -> Trajectory:
        """Calls that come at the same time wait for one recovery."""
        uid = registration.trajectory_uid
        task = self._entering.get(uid)
        if task is None:
            task = self._entering[uid] = asyncio.create_task(self._recover(registration))
            task.add_done_callback(lambda _: self._entering.pop(uid, None))
        return await asyncio.shield(task)

    async def _registration(self, uid: str) -> Registration | None:
        """What the log knows of a trajectory at this moment."""
        if uid not in self._known and _digest(uid) not in self._closed:
            await self._in_time(self._following.sync())
        return self._known.get(uid)

    async def _in_time(self, following: Awaitable[None]) -> None:
        """Followers wait for ever, clients do not."""
        try:
            async with asyncio.timeout(FOLLOW_LIMIT):
                await following
        except TimeoutError:
            raise Unavailable("Kafka does not answer at the moment; try again") from None

    @property
    def _following(self) -> Follower:
        assert self.follower is not None
        return self.follower

    async def _recover(self, registration: Registration) -> Trajectory:
        trajectory = Trajectory(registration)
        trajectory.registered = True
        trajectory.restore(await self._recovery.records(registration))
        metrics.recovered_trajectories.inc()
        return self._hold(trajectory)

    async def _recover_closed(self, registration: Registration) -> None:
        """Nobody keeps the registration of a closed trajectory: its End says the same."""
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

    def _hold(self, trajectory: Trajectory) -> Trajectory:
        self._held[trajectory.uid] = trajectory
        metrics.open_trajectories.set(len(self._held))
        return trajectory

    def _change_prompt(self, trajectory: Trajectory, prompt_uid: str, channel: str | None) -> None:
        """Clients may put their own prompt into the base URL that they were given."""
        if trajectory.steps or trajectory.running:
            raise BadRequest(
                f"trajectory {trajectory.uid} belongs to prompt "
                f"{trajectory.registration.prompt_uid}, not {prompt_uid}"
            )
        self._admit(trajectory.uid, channel or trajectory.registration.channel, prompt_uid)
        begins = self._log.end_before(prompt_uid)
        trajectory.registration = self._own(trajectory, prompt_uid=prompt_uid, begins=begins)
        trajectory.registered = False

    def _own(self, trajectory: Trajectory, **changes: Any) -> Registration:
        return msgspec.structs.replace(
            trajectory.registration, gateway=self._rules.gateway, **changes
        )

    # Registering

    def new_registration(
        self, uid: str, prompt_uid: str, tenant: str, **given: Any
    ) -> Registration:
        """Checks whether the trajectory may begin; nothing is written yet."""
        channel = given.get("channel") or TRAIN
        self._check_room(tenant)
        self._admit(uid, channel, prompt_uid)
        now = time.time()
        deadline_s = given.get("deadline_s") or self._rules.deadline_s
        return Registration(
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            run=self._rules.run,
            channel=channel,
            metadata=given.get("metadata") or "{}",
            group_size=given.get("group_size") or self._rules.group_size,
            deadline=int((now + deadline_s) * 1000),
            tenant=tenant,
            gateway=self._rules.gateway,
            implicit=given.get("implicit", False),
            begins=self._log.end_before(prompt_uid),
            created_at=int(now * 1000),
        )

    def _admit(self, uid: str, channel: str, prompt_uid: str) -> None:
        if channel != TRAIN:
            return
        if not self._admission.admits(prompt_uid):
            metrics.refused_groups.inc()
            raise TooMany(
                "as many groups run or wait for the trainer as may; "
                "begin this prompt when one of them is decided",
                code="too_many_groups",
            )
        self._admission.expect(uid, prompt_uid)

    def _check_room(self, tenant: str) -> None:
        limit = self._rules.max_open_trajectories
        if self._open_of[tenant] >= limit:
            raise TooMany(f"{limit} trajectories are open; complete some of them first")

    async def begin(self, registration: Registration) -> Trajectory:
        """Registers a trajectory before its first call."""
        trajectory = Trajectory(registration)
        await self.ensure_registered(trajectory)
        return self._hold(trajectory)

    async def ensure_registered(self, trajectory: Trajectory) -> None:
        """Returns when the log has the registration."""
        while not trajectory.registered:
            await asyncio.shield(self.start_registering(trajectory))

    def start_registering(self, trajectory: Trajectory) -> "asyncio.Task[None]":
        """Calls that want the registration share one write."""
        if trajectory.registering is None:
            trajectory.registering = asyncio.create_task(self._register(trajectory))
            trajectory.registering.add_done_callback(_heard)
        return trajectory.registering

    async def _register(self, trajectory: Trajectory) -> None:
        uid, registration = trajectory.uid, trajectory.registration
        try:
            place = await self._log.register(registration)
            if not self._following.note_own(place):
                await self._in_time(self._following.wait_until_seen(place))
            known = self._known.get(uid)
            if _digest(uid) in self._closed:
                raise Conflict(f"trajectory {uid} is completed; a call must open a new one")
            if known is not None and known.gateway != self._rules.gateway:
                await self._adopt(trajectory, known)
                return  # and write it again
        except Exception:
            self._admission.forget(uid)
            raise
        finally:
            trajectory.registering = None
        self._admission.apply(registration)
        self._note(registration)
        # Somebody may have changed it while it was written.
        trajectory.registered = trajectory.registration is registration

    async def _adopt(self, trajectory: Trajectory, known: Registration) -> None:
        """Another process had it first: what it registered holds, and its Steps come before ours."""
        trajectory.move_behind(await self._recovery.records(known))
        trajectory.registration = msgspec.structs.replace(
            known, gateway=self._rules.gateway, **trajectory.wishes
        )
        self._note(trajectory.registration)

    async def change(self, trajectory: Trajectory, **changes: Any) -> None:
        """Channel or metadata for the Steps from now on."""
        if trajectory.is_closed:
            raise Conflict(f"trajectory {trajectory.uid} is completed")
        registration = trajectory.registration
        if changes.get("channel") == TRAIN != registration.channel:
            self._admit(trajectory.uid, TRAIN, registration.prompt_uid)
        trajectory.wishes |= changes
        trajectory.registration = self._own(trajectory, implicit=False, **changes)
        trajectory.registered = False
        await self.ensure_registered(trajectory)

    # Closing

    async def complete(self, trajectory: Trajectory, about: "Completion") -> None:
        """Waits for running calls, then closes. The same again is no error; another is."""
        if trajectory.end is None:
            async with trajectory.closing:
                while trajectory.running:
                    await asyncio.wait([call.task for call in trajectory.running])
                if trajectory.end is None and trajectory.is_closed:
                    trajectory.end = await self._find_end(trajectory)
                if trajectory.end is None:
                    trajectory.end = await self._write_end(trajectory, about)
        self._check_same(trajectory.end, about)
        await self._write_closed(trajectory, trajectory.end)

    async def _find_end(self, trajectory: Trajectory) -> TrajectoryEnd | None:
        """The End that another process has written."""
        records = await self._recovery.records(trajectory.registration)
        return next((record for record in records if isinstance(record, TrajectoryEnd)), None)

    async def _write_end(self, trajectory: Trajectory, about: "Completion") -> TrajectoryEnd:
        registration = trajectory.registration
        end = TrajectoryEnd(
            end_id=str(uuid.uuid5(ENDS, f"{trajectory.uid} {about}")),
            trajectory_uid=trajectory.uid,
            prompt_uid=registration.prompt_uid,
            run=registration.run,
            channel=about.channel or registration.channel,
            status=about.status,
            steps=trajectory.steps,
            reward=about.reward,
            reward_expected=about.reward_expected,
            reason=about.reason,
            metadata=registration.metadata,
            group_size=registration.group_size,
            created_at=int(time.time() * 1000),
        )
        await self._log.write(end)
        return end

    def _check_same(self, end: TrajectoryEnd, about: "Completion") -> None:
        same = (end.status, end.reward) == (about.status, about.reward)
        if not same or about.channel not in (None, end.channel):
            raise Conflict(
                f"trajectory {end.trajectory_uid} is completed already, with status {end.status} "
                f"and reward {end.reward}; send later rewards as feedback"
            )

    async def _write_closed(self, trajectory: Trajectory, end: TrajectoryEnd) -> None:
        if trajectory.registration.status is not None:
            return
        closed = self._own(trajectory, status=end.status)
        self._following.note_own(await self._log.register(closed))
        trajectory.registration = closed
        self._admission.apply(closed)
        self._note(closed)

    # Memory

    async def tidy_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TIDY_EVERY)
            self.tidy(time.monotonic(), time.time())

    def tidy(self, monotonic: float, now: float) -> None:
        """Forgets what can be read back, and what was abandoned long ago."""
        idle = [
            uid
            for uid, trajectory in self._held.items()
            if not trajectory.running and monotonic - trajectory.last_used > IDLE
        ]
        for uid in idle:
            del self._held[uid]
        limit = (now - FORGET_AFTER) * 1000
        abandoned = [uid for uid, r in self._known.items() if (r.deadline or limit) < limit]
        for uid in abandoned:
            self._open_of[self._known.pop(uid).tenant] -= 1
        metrics.open_trajectories.set(len(self._held))


class Rules(msgspec.Struct, frozen=True):
    """What holds for every trajectory that is opened here."""

    run: str
    gateway: str
    """The name of this process."""
    group_size: int
    deadline_s: float
    max_open_trajectories: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """How a trajectory ended, as its agent says."""

    status: Status = "completed"
    reward: float | None = None
    reward_expected: bool = False
    channel: str | None = None
    reason: str | None = None


class Closed(NamedTuple):
    """What is kept of a closed trajectory: enough to find its End in the log."""

    begins: Position
    tenant: str


def _merge(known: Registration, record: Registration) -> Registration:
    """What two registrations say together. The newer one holds, unless a mere call made it; the Steps
    begin at the earlier place."""
    if known.begins.partition != record.begins.partition:
        return record
    begins = min(known.begins, record.begins)
    if record.implicit and record.status is None:
        return msgspec.structs.replace(known, begins=begins, gateway=record.gateway)
    return msgspec.structs.replace(record, begins=begins)


def _heard(task: "asyncio.Task[None]") -> None:
    """Whoever waits for it is told of a failure; it may be that nobody waits any more."""
    if not task.cancelled():
        task.exception()


def _digest(uid: str) -> bytes:
    return hashlib.blake2b(uid.encode(), digest_size=12).digest()
