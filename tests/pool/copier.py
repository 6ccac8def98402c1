"""A reward worker without rewards, as a process of its own: copies `steps` to `rewarded`.

    python -m tests.pool.copier CONNECTION_JSON NAME [--die-at STAGE] [--die-after N] [--slow S]

Items finish on other threads in any order, as those of a real worker do. The process kills itself
with SIGKILL when it reaches the stage for the N-th time, and then says so on stdout first; it also
says when it has partitions. SIGTERM, which may be blocked when it starts, ends it cleanly. When its
transaction was aborted while it stood still, it ends with FENCED, for a supervisor to start it again.
"""

import argparse
import faulthandler
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.core.progress import WorkItem
from pool.core.trajectories import (
    StrayRecord,
    Trajectory,
    TrajectoryAssembler,
    annotate,
    source_position,
)
from pool.producers.output import Output
from pool.topics import REWARDED, STEPS
from schemas import Record
from servicekit.errors import Fenced

GROUP = "copier"
PENDING = "pending"
"""A commit was made while some items were not finished."""
FENCED = 3
STAGES = ("produced", "offsets sent", "rebuilding", PENDING, "revoking")


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def suicide(stage: str, count: int) -> Callable[[str], None]:
    left = [count]

    def probe(reached: str) -> None:
        if reached != stage:
            return
        left[0] -= 1
        if left[0] == 0:
            say(f"died at {stage}")
            os.kill(os.getpid(), signal.SIGKILL)

    return probe


class Copier:
    def __init__(self, connection: Connection, name: str, probe: Callable[[str], None]) -> None:
        self._probe = probe
        self._codec = connection.codec()
        self._rewarded = connection.topic_name(REWARDED)
        self._threads = ThreadPoolExecutor(4)
        self._unfinished = 0
        self._lock = threading.Lock()
        self._consumer: StatefulConsumer[Trajectory | StrayRecord] = StatefulConsumer(
            connection,
            topic=STEPS,
            group=GROUP,
            transactional_id=f"{GROUP}-{connection.topic_prefix}-{name}",
            assembler=lambda partition: TrajectoryAssembler(),
            codec=self._codec,
            probe=probe,
        )

    def run(self, stop: threading.Event, busy: float) -> None:
        has_said = False
        with self._consumer:
            while not stop.is_set():
                if not has_said and self._consumer.offsets():
                    say("working")
                    has_said = True
                for work in self._consumer.poll():
                    with self._lock:
                        self._unfinished += 1
                    self._threads.submit(self._copy, work)
                if self._consumer.commit() and self._unfinished:
                    self._probe(PENDING)
                time.sleep(busy)
        self._threads.shutdown()

    def _copy(self, work: WorkItem[Trajectory | StrayRecord]) -> None:
        time.sleep(random.uniform(0, 0.05))
        item = work.item
        received = item.records if isinstance(item, Trajectory) else [item.received]
        self._consumer.finish(
            [work], [self._output(annotate(r.record, source_position(r))) for r in received]
        )
        with self._lock:
            self._unfinished -= 1

    def _output(self, record: Record) -> Output:
        key = getattr(record, "prompt_uid", None)
        return Output(self._rewarded, key, self._codec.encode(record, self._rewarded))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("connection")
    parser.add_argument("name")
    parser.add_argument("--die-at", default="")
    parser.add_argument("--die-after", type=int, default=1)
    parser.add_argument("--busy", type=float, default=0.0, help="seconds between two polls")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    faulthandler.register(signal.SIGUSR1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    probe = suicide(arguments.die_at, arguments.die_after)
    connection = Connection.model_validate_json(arguments.connection)
    try:
        Copier(connection, arguments.name, probe).run(stop, arguments.busy)
    except Fenced:
        logging.exception("%s ends", arguments.name)
        sys.exit(FENCED)


if __name__ == "__main__":
    main()
