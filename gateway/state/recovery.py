"""Trajectories back from the log, many in one pass.

After a restart the agents of a thousand trajectories come back at once. Those of one partition that
wait while a pass is under way are read together in the next one.
"""

import asyncio
from collections.abc import Sequence

from gateway.state.log import Log, StepsRecord
from schemas import Registration

Records = Sequence[StepsRecord]


class Recovery:
    """Reads one partition at a time; run `work` as a task."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._wanted: dict[int, dict[str, tuple[Registration, asyncio.Future[Records]]]] = {}
        self._asked = asyncio.Event()

    async def records(self, registration: Registration) -> Records:
        """What `steps` holds of a trajectory."""
        waiting = self._wanted.setdefault(registration.begins.partition, {})
        uid = registration.trajectory_uid
        if uid not in waiting:
            waiting[uid] = registration, asyncio.get_running_loop().create_future()
            self._asked.set()
        return await asyncio.shield(waiting[uid][1])

    async def work(self) -> None:
        while True:
            await self._asked.wait()
            while self._wanted:
                await self._pass(self._wanted.pop(next(iter(self._wanted))))
            self._asked.clear()

    async def _pass(
        self, waiting: dict[str, tuple[Registration, "asyncio.Future[Records]"]]
    ) -> None:
        starts = {uid: registration.begins for uid, (registration, _) in waiting.items()}
        try:
            records = await self._log.records_of(starts)
        except Exception as error:
            for _, found in waiting.values():
                if not found.done():
                    found.set_exception(error)
            return
        for uid, (_, found) in waiting.items():
            if not found.done():
                found.set_result(records[uid])
