"""Scanning, exporting and importing the log, compared with bare assembly into groups.

Peak memory is measured for the command in its own process, on a much larger log.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.log.consume import assemble
from bench.log.steps import GROUP_SIZE, STEPS_EACH, StepFactory, key
from bench.measure import compare, show
from pool import topics
from pool.connection import Connection
from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group
from pool.producers.producer import Producer
from pool.readers.scan import Scan, decode_message
from pool.topics import STEPS, find_topics
from replay.export import parquet as _  # noqa: F401  imported here, so that loading pyarrow is not measured
from replay.export.command import export
from replay.importer.command import import_files
from replay.offset_ranges import stored_ranges
from replay.settings import DatasetExportSettings, ImportSettings

GROUPS = 600
MANY_STEPS = 200_000
PARTITIONS = 4
IN_FLIGHT = 1_000


def run(connection: Connection) -> None:
    topics.create(connection, partitions=PARTITIONS)
    asyncio.run(fill(connection, GROUPS))
    with tempfile.TemporaryDirectory() as folder:
        exports = new_paths(Path(folder))
        bare, scanned, parquet, flat, jsonl = compare(
            lambda: assemble(connection),
            lambda: scan(connection),
            lambda: export_all(connection, next(exports), format="parquet"),
            lambda: export_all(connection, next(exports), format="parquet", per="step"),
            lambda: export_all(connection, next(exports), format="jsonl"),
        )
        show(
            f"{bare.records:,} records: Steps of 512 + 256 tokens and their Ends",
            {
                "decode and assemble into groups": bare,
                "the same by Scan": scanned,
                "export to Parquet": parquet,
                "the same, one row per Step": flat,
                "export to JSON lines": jsonl,
            },
            "target: Scan at least 0.80, Parquet at least 0.50",
        )
        show_import(connection, next(exports))
        show_memory(connection.model_copy(update={"topic_prefix": "many."}), Path(folder))


def new_paths(folder: Path) -> Iterator[Path]:
    while True:
        yield folder / uuid.uuid4().hex


async def fill(connection: Connection, groups: int) -> None:
    records = iter(StepFactory(512, 256).records(groups))
    async with Producer(connection, connection.codec(), linger_ms=20) as producer:

        async def agent() -> None:
            for record in records:
                await producer.send(STEPS, key(record), record)

        await asyncio.gather(*(agent() for _ in range(IN_FLIGHT)))


def scan(connection: Connection) -> int:
    codec, count = connection.codec(), 0
    assemblers = {n: GroupAssembler() for n in range(find_topics(connection)[STEPS].partitions)}
    with Scan(connection, STEPS, stored_ranges(connection, STEPS)) as messages:
        for message in messages:
            record = decode_message(message, codec)
            item = assemblers[record.partition].feed(record)
            if isinstance(item, Group):
                assemblers[record.partition].decide(item, record.offset)
            count += 1
    return count


def export_all(connection: Connection, into: Path, **settings: Any) -> int:
    export(DatasetExportSettings(**connection.model_dump(), into=into, topic="steps", **settings))
    return sum(span.end - span.first for span in stored_ranges(connection, STEPS).values())


def show_import(connection: Connection, folder: Path) -> None:
    export_all(connection, folder)
    other = connection.model_copy(update={"topic_prefix": "imported."})
    topics.create(other, partitions=PARTITIONS)
    started = time.perf_counter()
    import_files(ImportSettings(**other.model_dump(), files=(folder,)))
    rate = GROUPS * GROUP_SIZE * STEPS_EACH / (time.perf_counter() - started)
    print(f"  import of the Parquet files, validation included: {rate:,.0f} Steps/s")


def show_memory(connection: Connection, folder: Path) -> None:
    topics.create(connection, partitions=PARTITIONS)
    asyncio.run(fill(connection, MANY_STEPS // (GROUP_SIZE * STEPS_EACH)))
    other = connection.model_copy(update={"topic_prefix": "many-again."})
    topics.create(other, partitions=PARTITIONS)
    print(f"\n{MANY_STEPS:,} Steps of 512 + 256 tokens, by the command in its own process")
    export_arguments = ["export", "--topic", "steps", "--into"]
    quarter = MANY_STEPS // PARTITIONS // 4
    commands = {
        "a quarter to Parquet": (
            connection,
            [*export_arguments, f"{folder}/part", "--until", str(quarter)],
        ),
        "all to Parquet": (connection, [*export_arguments, f"{folder}/all"]),
        "all to JSON lines": (connection, [*export_arguments, f"{folder}/all.jsonl"]),
        "all from Parquet": (other, ["import", f"{folder}/all"]),
    }
    for name, (target, arguments) in commands.items():
        seconds, peak = measure_command(target, arguments)
        steps = MANY_STEPS // 4 if name.startswith("a quarter") else MANY_STEPS
        rate, mib = steps / seconds, peak / 2**20
        print(f"  {name:<24} {rate:>8,.0f} Steps/s   {mib:>6.0f} MiB peak")
    print("  target: a peak that does not depend on the number of Steps")


RUN = """
import sys
from steplog.cli import main
assert main() == 0
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
"""The process reports its own peak: the one that the system reports for a child includes memory of its
parent before exec."""


def measure_command(connection: Connection, arguments: list[str]) -> tuple[float, int]:
    """Runs `steplog replay`; returns the seconds and the peak of resident memory in bytes."""
    address = ["--bootstrap", connection.bootstrap, "--topic-prefix", connection.topic_prefix]
    started = time.perf_counter()
    completed = subprocess.run(
        [sys.executable, "-c", RUN, "replay", *arguments, *address],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.perf_counter() - started, int(completed.stdout.split()[-1]) * 1024
