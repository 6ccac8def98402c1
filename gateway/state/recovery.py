"""Reads trajectories back from the log, many in one pass.

After a restart the agents of a thousand trajectories come back at once. All trajectories of one
partition that are requested while a pass is running are read together in the next pass.
"""

import asyncio
from collections.abc import Sequence

from gateway.state.log import StepsLog, StepsRecord
from schemas import Registration

Records = Sequence[StepsRecord]
PartitionRequests = dict[str, tuple[Registration, "asyncio.Future[Records]"]]


class Recovery:
    """Reads one partition at a time; run `serve_requests` as a task."""

    def __init__(self, log: StepsLog) -> None:
        self._log = log
        self._requests: dict[int, PartitionRequests] = {}
        self._has_requests = asyncio.Event()

    async def records(self, registration: Registration) -> Records:
        """The records of one trajectory in `steps`."""
        requests = self._requests.setdefault(registration.begins.partition, {})
        uid = registration.trajectory_uid
        if uid not in requests:
            requests[uid] = registration, asyncio.get_running_loop().create_future()
            self._has_requests.set()
        return await asyncio.shield(requests[uid][1])

    async def serve_requests(self) -> None:
        while True:
            await self._has_requests.wait()
            while self._requests:
                await self._read_partition(self._requests.pop(next(iter(self._requests))))
            self._has_requests.clear()

    async def _read_partition(self, requests: PartitionRequests) -> None:
        starts = {uid: registration.begins for uid, (registration, _) in requests.items()}
        try:
            records = await self._log.records_of(starts)
        except Exception as error:
            for _, future in requests.values():
                if not future.done():
                    future.set_exception(error)
            return
        for uid, (_, future) in requests.items():
            if not future.done():
                future.set_result(records[uid])
