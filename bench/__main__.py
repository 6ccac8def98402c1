"""Benchmarks of steplog. Every figure is measured beside a peer or the raw limit in the same run.

Without arguments all parts run, against a temporary local Kafka broker.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import replay, reward
from bench.atropos import run as atropos
from bench.gateway import run as gateway
from bench.log import consume, memory, produce, record_size
from pool.connection import Connection
from steplog.kafka import local_kafka
from tests.conftest import free_port


class Part(NamedTuple):
    run: Callable[[Connection], None]
    help: str


def run_log(connection: Connection) -> None:
    record_size.run()
    produce.run(connection)
    consume.run(connection)
    memory.run(connection.model_copy(update={"topic_prefix": "memory."}))


def run_training(_: Connection) -> None:
    from bench.training import balance, cpu  # import torch, which the other parts do not need

    balance.run()
    cpu.run_trees()
    cpu.run()


PARTS = {
    "log": Part(run_log, "record size, producing, reading and assembling, memory"),
    "gateway": Part(gateway.run, "CPU and latency of a recorded call, concurrent streams"),
    "atropos": Part(atropos.run, "the Atropos API beside Atropos' own server"),
    "reward": Part(reward.run, "scoring with exact match and with a slow judge"),
    "training": Part(
        run_training, "balance over ranks, trees against rows, a step on the CPU beside TRL's"
    ),
    "replay": Part(replay.run, "exporting and importing the log"),
}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the broker, too
    names = _parse_arguments().parts or list(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        broker = local_kafka.start(Path(folder), free_port())
        try:
            started = time.monotonic()
            for name in names:
                PARTS[name].run(Connection(bootstrap=broker.bootstrap, topic_prefix=f"{name}."))
            print(f"\ntotal: {time.monotonic() - started:.0f} s")
        finally:
            local_kafka.stop(Path(folder))


def _parse_arguments() -> argparse.Namespace:
    lines = "\n".join(f"  {name:<10} {part.help}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=f"parts:\n{lines}\n\nOn a GPU: python -m bench.gpu, bench.training.gpu, bench.weights",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="one of those below")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    return arguments


if __name__ == "__main__":
    main()
