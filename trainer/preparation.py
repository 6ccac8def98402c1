"""Prepares batches in a thread of its own, while an earlier batch is trained.

Rank 0 announces a Decision to the other ranks as soon as it is made. An announcement only saves time: a
rank that has not begun to prepare a batch when it is to be trained prepares it then. Announcements have
a process group of their own, so that they never meet the collectives of training.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from pool.core.ledger import GroupId
from schemas import Codec, Decision
from trainer.model.sharding import Ranks
from trainer.rank_orders import BatchOrder, RankOrders
from trainer.training import PreparedBatch

Prepare = Callable[[Decision, set[GroupId]], PreparedBatch]

LONGEST_SILENCE = timedelta(days=365)
"""Ranks wait for announcements for as long as a run may wait for groups."""


class BatchPreparation:
    """Batches that are being prepared on this rank. Used from the loop's thread, except `start`, which
    may be called from any."""

    def __init__(
        self,
        prepare: Prepare,
        ranks: Ranks,
        codec: Codec,
        probe: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Every rank has to create it at the same time."""
        self._prepare = prepare
        self._codec = codec
        self._probe = probe
        self._announcements = RankOrders(ranks, _new_group(ranks))
        self._queue: SimpleQueue[BatchOrder | None] = SimpleQueue()
        self._batches: dict[int, tuple[set[GroupId], Future[PreparedBatch]]] = {}
        """What is prepared, without which withdrawn groups, by the sequence number of the Decision."""
        self._lock = threading.Lock()
        run = self._run_leader if ranks.rank == 0 else self._run_follower
        self._thread = threading.Thread(target=run, name="preparation", daemon=True)
        self._thread.start()

    def start(self, decision: Decision, withdrawn: set[GroupId]) -> None:
        """Begins to prepare a batch on all ranks, without withdrawn groups; only rank 0 calls it."""
        with self._lock:
            self._batches[decision.sequence] = withdrawn, Future()
        self._queue.put(BatchOrder.of(self._codec, decision, withdrawn))

    def take(self, decision: Decision, withdrawn: set[GroupId]) -> PreparedBatch:
        """The batch of a Decision; waits for it if it is being prepared."""
        with self._lock:
            begun = self._batches.get(decision.sequence)
            self._batches = {n: each for n, each in self._batches.items() if n > decision.sequence}
        if begun is None or begun[0] != withdrawn:
            return self._prepare(decision, withdrawn)
        return begun[1].result()

    def close(self) -> None:
        """Ends the thread; rank 0 ends those of all ranks."""
        self._queue.put(None)
        self._thread.join()

    def _run_leader(self) -> None:
        while (order := self._queue.get()) is not None:
            self._announcements.send("prepare", order.encode())
            self._execute(order)
        self._announcements.send("stop")

    def _run_follower(self) -> None:
        while (announced := self._announcements.receive()).kind == "prepare":
            self._execute(BatchOrder.decode(announced.content))

    def _execute(self, order: BatchOrder) -> None:
        decision, withdrawn = order.decision_of(self._codec), set(order.withdrawn)
        with self._lock:
            _, future = self._batches.setdefault(decision.sequence, (withdrawn, Future()))
        try:
            future.set_result(self._prepare(decision, withdrawn))
        except Exception as error:
            future.set_exception(error)
        self._probe("prepared")


def _new_group(ranks: Ranks) -> Any:
    return dist.new_group(backend="gloo", timeout=LONGEST_SILENCE) if ranks.world > 1 else None
