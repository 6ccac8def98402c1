"""Processes die for real, and every expected record is in the output topic exactly once."""

import asyncio
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from confluent_kafka import Consumer, TopicPartition

from pool import topics
from pool.connection import Connection
from pool.consumers.transaction import read_offsets
from pool.core.progress import Received
from pool.core.trajectories import Trajectory, TrajectoryAssembler
from pool.producers.producer import Producer
from pool.topics import REWARDED, STEPS
from schemas import Record, Step, TrajectoryEnd
from steplog.kafka import local_kafka
from tests import processes
from tests.conftest import free_port, kill
from tests.pool import copier
from tests.pool.log import identity, messages, records

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS = 25
STEPS_EACH = 3
PROMPTS = 40
EVERY_PARTITION = PROMPTS * (STEPS_EACH + 1)
"""Records that have all prompts among them."""
REBALANCE = 120.0
"""Seconds for a group to settle after a kill, on a busy machine."""


class Load:
    """Writes trajectories in the background until it is told to stop, and knows what it wrote."""

    def __init__(self, connection: Connection, rate: float) -> None:
        self._connection = connection
        self._pause = 1 / rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._write()))
        self.acknowledged: list[str] = []
        self.error: BaseException | None = None

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        self._stop.set()
        self._thread.join()

    async def _write(self) -> None:
        producer = Producer(self._connection, self._connection.codec(), timeout=60)
        number = 0
        async with producer:
            while not self._stop.is_set():
                await asyncio.gather(self._trajectory(producer, number), asyncio.sleep(self._pause))
                number += 1

    async def _trajectory(self, producer: Producer, number: int) -> None:
        for record in trajectory(number):
            await producer.send(STEPS, f"p{number % PROMPTS}", record)
            self.acknowledged.append(identity(record))


def trajectory(number: int) -> Iterator[Record]:
    about = {"trajectory_uid": f"t{number}", "prompt_uid": f"p{number % PROMPTS}", "run": "r"}
    for index in range(STEPS_EACH):
        yield Step(
            step_id=f"s{number}.{index}",
            step_index=index,
            prompt_ids=b"\1\0\0\0",
            response_ids=b"\2\0\0\0",
            response_logprobs=b"\0\0\0\0",
            **about,  # type: ignore[arg-type]
        )
    yield TrajectoryEnd(
        end_id=f"e{number}",
        status="completed",
        steps=STEPS_EACH,
        reward=1.0,
        **about,  # type: ignore[arg-type]
    )


class Worker:
    """A copier process."""

    started: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(
        self, connection: Connection, name: str, die_at: str = "", after: int = 1, busy: float = 0
    ) -> None:
        command = [sys.executable, "-m", "tests.pool.copier", connection.model_dump_json(), name]
        command += ["--die-at", die_at, "--die-after", str(after), "--busy", str(busy)]
        self._command = command
        self.start()

    def start(self) -> None:
        # Told to end before it listens, it hears so later.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self.process: subprocess.Popen[str] = processes.Popen(
                self._command, stdout=subprocess.PIPE, text=True
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.started.append(self.process)

    def wait_until_killed(self) -> str:
        """The stage at which it died."""
        said, _ = self.process.communicate(timeout=REBALANCE)
        assert self.process.returncode == -signal.SIGKILL, "it ended by itself"
        return said.splitlines()[-1].removeprefix("died at ")

    def start_if_ended(self) -> None:
        """As a supervisor does."""
        if self.process.poll() is not None:
            self.start()

    def has_spoken(self) -> bool:
        """It has partitions, or has ended."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0.1)[0])

    def wait_until_it_works(self) -> "Worker":
        deadline = time.monotonic() + REBALANCE
        while not self.has_spoken():
            assert time.monotonic() < deadline, "it got no partitions"
        assert self.process.poll() is None, "it ended by itself"
        return self

    def stop(self) -> int:
        """Asks it to end; says on stderr what it does if it does not. Gives its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=REBALANCE)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            raise


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    for process in Worker.started:
        process.kill()
        process.communicate()
    Worker.started.clear()


def lag(connection: Connection) -> int:
    """What any Kafka tool shows for the group."""
    consumer = Consumer(connection.confluent(group_id=copier.GROUP))
    found = topics.find_topics(connection)[STEPS].partitions
    places = [TopicPartition(connection.topic_name(STEPS), number) for number in range(found)]
    committed = read_offsets(consumer, places, patience=30)
    ends = [consumer.get_watermark_offsets(place, timeout=30)[1] for place in places]
    consumer.close()
    return sum(end - max(0, at.offset) for at, end in zip(committed, ends, strict=True))


def wait_for_no_lag(connection: Connection) -> None:
    deadline = time.monotonic() + REBALANCE
    while lag(connection):
        assert time.monotonic() < deadline, f"a lag of {lag(connection)} stays"
        time.sleep(0.2)


def copies(connection: Connection) -> Counter[str]:
    return Counter(identity(record) for record in records(connection, REWARDED))


def settle(connection: Connection, load: Load) -> None:
    """After a quiet period every acknowledged record has one copy, and nothing else has any."""
    come_to_rest(connection, load, Worker(connection, "last"))
    assert copies(connection) == Counter(load.acknowledged)


def come_to_rest(connection: Connection, load: Load, last: Worker) -> None:
    load.finish()
    wait_for_no_lag(connection)
    wait_for_copies(connection, load.acknowledged)
    assert last.stop() == 0


def wait_for_copies(
    connection: Connection, expected: list[str], meanwhile: Callable[[], None] = lambda: None
) -> None:
    deadline = time.monotonic() + REBALANCE
    while missing := Counter(expected) - copies(connection):
        assert time.monotonic() < deadline, f"missing in the output: {sorted(missing)}"
        meanwhile()


def test_a_consumer_killed_at_any_point_writes_each_record_once(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    points = [stage for stage in copier.STAGES for _ in range(KILLS // len(copier.STAGES))]
    random.Random(7).shuffle(points)
    hit: Counter[str] = Counter()
    with Load(connection, rate=30) as load:
        process_something(connection, load)
        for number, stage in enumerate(points):
            worker = Worker(connection, "a", stage, after=random.Random(number).randint(1, 4))
            if stage == "revoking":
                hit[die_of_revocation(connection, worker)] += 1
            else:
                hit[worker.wait_until_killed()] += 1
        settle(connection, load)
    assert hit.total() >= 20
    assert set(hit) == set(copier.STAGES), f"never killed at {set(copier.STAGES) - set(hit)}"


def process_something(connection: Connection, load: Load) -> None:
    """So that there is something to rebuild from the first kill on."""
    worker = Worker(connection, "a")
    wait_for_acknowledgements(load, 100)
    wait_for_copies(connection, load.acknowledged[:50])
    assert worker.stop() == 0


def die_of_revocation(connection: Connection, worker: Worker) -> str:
    """Another member comes and goes, and takes partitions each time, until the worker dies of it."""
    while worker.process.poll() is None:
        deadline = time.monotonic() + REBALANCE
        other = Worker(connection, "b")
        while worker.process.poll() is None and not other.has_spoken():
            assert time.monotonic() < deadline, "nothing was revoked"
        assert other.stop() == 0
    return worker.wait_until_killed()


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[local_kafka.Broker]:
    yield local_kafka.start(tmp_path, free_port())
    local_kafka.stop(tmp_path)


def test_a_broker_killed_under_the_consumer_loses_and_repeats_nothing(
    own_broker: local_kafka.Broker,
) -> None:
    connection = Connection(bootstrap=own_broker.bootstrap)
    topics.create(connection, partitions=4)
    worker = Worker(connection, "a")
    with Load(connection, rate=30) as load:
        for _ in range(3):
            wait_for_acknowledgements(load, len(load.acknowledged) + 100)
            kill_and_restart(own_broker)
            wait_for_acknowledgements(load, len(load.acknowledged) + 100)
            wait_for_copies(connection, load.acknowledged[:-50], worker.start_if_ended)
        settle_after_kills(own_broker, connection, load, worker)


def test_a_broker_killed_again_while_a_transaction_is_in_doubt_loses_and_repeats_nothing(
    own_broker: local_kafka.Broker,
) -> None:
    connection = Connection(bootstrap=own_broker.bootstrap)
    topics.create(connection, partitions=4)
    worker = Worker(connection, "a")
    with Load(connection, rate=30) as load:
        for _ in range(4):
            wait_for_acknowledgements(load, len(load.acknowledged) + 100)
            kill_and_restart(own_broker)
        wait_for_acknowledgements(load, len(load.acknowledged) + 100)
        settle_after_kills(own_broker, connection, load, worker)


def settle_after_kills(
    broker: local_kafka.Broker, connection: Connection, load: Load, worker: Worker
) -> None:
    """As `settle`, but for a defect of the broker. One that is killed before it has written a
    transaction's markers may take the partitions for deleted when it restarts, and says so in its
    log. The transaction then stays open, and readers stop at it, until the same producer ends its
    next one there; what it had aborted shows as part of that. No client can prevent it, so readers
    fold what has the same id: they see every trajectory once."""
    worker.stop()  # it may have given up on its own, for a supervisor to start it again
    worker.start()
    worker.wait_until_it_works()
    wait_for_acknowledgements(load, len(load.acknowledged) + EVERY_PARTITION)
    come_to_rest(connection, load, worker)
    assert set(copies(connection)) == set(load.acknowledged)
    ends = [uid for uid in load.acknowledged if uid.startswith("e")]
    assert Counter(whole_trajectories(connection)) == Counter(ends)
    if b"likely deleted already" not in broker.log.read_bytes():
        assert copies(connection) == Counter(load.acknowledged)


def kill_and_restart(broker: local_kafka.Broker) -> None:
    running = local_kafka.status(broker.directory)
    assert running is not None
    kill(running)
    local_kafka.start(broker.directory, broker.port)


def whole_trajectories(connection: Connection) -> Iterator[str]:
    """What a reader of the output assembles, named by the End."""
    assemblers: defaultdict[int, TrajectoryAssembler] = defaultdict(TrajectoryAssembler)
    for message in messages(connection, REWARDED):
        record = connection.codec().decode(message.value)
        item = assemblers[message.partition].feed(
            Received(record, message.partition, message.offset)
        )
        if isinstance(item, Trajectory):
            assert item.problem is None
            yield item.end.end_id


def wait_for_acknowledgements(load: Load, count: int) -> None:
    deadline = time.monotonic() + REBALANCE
    while len(load.acknowledged) < count:
        assert time.monotonic() < deadline, "the producer is stuck"
        time.sleep(0.1)


def test_members_join_and_leave_while_one_is_busy(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    busy = Worker(connection, "busy", busy=2.0).wait_until_it_works()
    with Load(connection, rate=30) as load:
        for number in range(5):
            joining = Worker(connection, f"joining-{number % 2}").wait_until_it_works()
            wait_for_acknowledgements(load, len(load.acknowledged) + 100)
            assert joining.stop() == 0
        assert busy.stop() == 0
        settle(connection, load)


def test_a_member_that_was_stopped_and_wakes_up_repeats_nothing(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    zombie, other = Worker(connection, "zombie"), Worker(connection, "other")
    other.wait_until_it_works()
    with Load(connection, rate=30) as load:
        for _ in range(3):
            if zombie.process.poll() == copier.FENCED:  # it was stopped inside a transaction
                zombie = Worker(connection, "zombie")
            zombie.wait_until_it_works()
            wait_for_acknowledgements(load, len(load.acknowledged) + 50)
            zombie.process.send_signal(signal.SIGSTOP)
            wait_for_acknowledgements(load, len(load.acknowledged) + 30 * 15 * STEPS_EACH)
            zombie.process.send_signal(signal.SIGCONT)
            wait_for_acknowledgements(load, len(load.acknowledged) + 300)
        assert other.stop() == 0
        assert zombie.stop() in (0, copier.FENCED)
        settle(connection, load)
