"""Scoring: exact match on trajectories, compared with bare assembly; and a judge that takes 1 s."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from confluent_kafka import Consumer, TopicPartition

from bench.log.consume import assemble
from bench.log.steps import GROUP_SIZE, STEPS_EACH, StepFactory, key
from bench.measure import measure
from pool import topics
from pool.connection import Connection
from pool.consumers.consumer import consumer_options
from pool.producers.producer import Producer
from pool.topics import REWARDED, STEPS, find_topics
from schemas import Record, Step, TrajectoryEnd
from schemas.packing import pack_ids
from tests.conftest import free_port
from tests.tiny_model import build_tokenizer

GROUPS = 1_000
TRAJECTORIES = GROUPS * GROUP_SIZE
RECORDS_PER_TRAJECTORY = STEPS_EACH + 1
JUDGED = 1_000
IN_FLIGHT = 100
JUDGE = """
import asyncio

async def judge(trajectory):
    await asyncio.sleep(1.0)
    return 1.0
"""


def run(connection: Connection) -> None:
    topics.create(connection, partitions=4)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tokenizer(Path(folder))
        judge = Path(folder) / "judge.py"
        judge.write_text(JUDGE)
        asyncio.run(fill(connection, GROUPS))
        show_exact_match(connection, tokenizer)
        judged = connection.model_copy(update={"topic_prefix": "judged."})
        topics.create(judged, partitions=4)
        asyncio.run(fill(judged, JUDGED // GROUP_SIZE))
        show_judge(judged, judge)


async def fill(connection: Connection, groups: int) -> None:
    """Writes trajectories whose last answer is 42, which exact match scores as right."""
    records = (with_answer(record) for record in StepFactory(512, 256).records(groups))
    async with Producer(connection, connection.codec()) as producer:

        async def agent() -> None:
            for record in records:
                await producer.send(STEPS, key(record), record)

        await asyncio.gather(*(agent() for _ in range(1_000)))


def with_answer(record: Record) -> Record:
    metadata = json.dumps({"answer": "42"})
    if isinstance(record, TrajectoryEnd):
        return msgspec.structs.replace(record, metadata=metadata, reward=None)
    assert isinstance(record, Step)
    if record.step_index < STEPS_EACH - 1:
        return record
    ids = pack_ids(list(b"42"))
    return msgspec.structs.replace(record, response_ids=ids, response_logprobs=bytes(len(ids)))


def show_exact_match(connection: Connection, tokenizer: Path) -> None:
    bare = measure(lambda: assemble(connection))
    with running_worker(connection, "exact_match", tokenizer) as worker:
        seconds, cpu = drain(connection, worker, TRAJECTORIES * RECORDS_PER_TRAJECTORY)
    rows = {
        "bare assembly, nothing written": (
            bare.rate / RECORDS_PER_TRAJECTORY,
            bare.records / bare.cpu / RECORDS_PER_TRAJECTORY,
        ),
        "scored, in a transaction with the offsets": (TRAJECTORIES / seconds, TRAJECTORIES / cpu),
    }
    print(f"\nReward: exact match on {TRAJECTORIES:,} trajectories of {STEPS_EACH} Steps, 1 worker")
    print(f"  {'':<44} {'traj./s':>10} {'of bare':>8} {'per core':>10} {'of bare':>8}")
    bare_rate, bare_core = next(iter(rows.values()))
    for name, (rate, core) in rows.items():
        print(
            f"  {name:<44} {rate:>10,.0f} {rate / bare_rate:>8.2f} "
            f"{core:>10,.0f} {core / bare_core:>8.2f}"
        )
    print("  target per core: 1,000, and 0.2 of bare assembly; broker and worker share the cores")


def show_judge(connection: Connection, judge: Path) -> None:
    spec = f"{judge}:judge?at_once={IN_FLIGHT}"
    with running_worker(connection, spec, None) as worker:
        seconds, _ = drain(connection, worker, JUDGED * RECORDS_PER_TRAJECTORY)
    print(f"\nReward: a judge that takes 1 s, {IN_FLIGHT} at once")
    print(f"  {JUDGED / seconds:.0f} trajectories/s; target: 90")


def drain(connection: Connection, worker: psutil.Process, count: int) -> tuple[float, float]:
    """Seconds from the first output to the last, and the CPU seconds of all processes of the worker."""
    topic = connection.topic_name(REWARDED)
    consumer = Consumer(consumer_options(connection, "bench-rewarded"))
    partitions = [
        TopicPartition(topic, n, 0) for n in range(find_topics(connection)[REWARDED].partitions)
    ]
    consumer.assign(partitions)
    began, cpu, remaining = 0.0, 0.0, count
    while remaining:
        received = len(consumer.consume(500, 1.0))
        if received and not began:
            began, cpu = time.perf_counter(), cpu_seconds(worker)
            remaining -= received
        else:
            remaining -= received
    seconds, spent = time.perf_counter() - began, cpu_seconds(worker) - cpu
    consumer.close()
    return seconds, spent


def cpu_seconds(worker: psutil.Process) -> float:
    times = [p.cpu_times() for p in (worker, *worker.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


@contextmanager
def running_worker(
    connection: Connection, spec: str, tokenizer: Path | None
) -> Iterator[psutil.Process]:
    command = [str(Path(sys.executable).with_name("steplog")), "reward", "--port", str(free_port())]
    command += ["--bootstrap", connection.bootstrap, "--topic-prefix", connection.topic_prefix]
    command += ["--function", spec]
    command += ["--tokenizer", str(tokenizer)] if tokenizer else []
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()
