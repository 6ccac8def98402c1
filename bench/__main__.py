"""`make bench`: what steplog costs, each line beside a peer or the raw limit in the same run.

`python -m bench gateway` runs one part.
"""

import signal
import sys
import tempfile
import time
from pathlib import Path

from bench import atropos, consume, memory, produce, replay, rewards, size
from bench.gateway import run as gateway
from pool.connection import Connection
from steplog.kafka import local_kafka
from tests.conftest import free_port


def log(connection: Connection) -> None:
    size.run()
    produce.run(connection)
    consume.run(connection)
    memory.run(connection.model_copy(update={"topic_prefix": "memory."}))


def training(_: Connection) -> None:
    from bench.training import cpu  # torch, which the other parts can do without

    cpu.run()


PARTS = {
    "log": log,
    "gateway": gateway.run,
    "atropos": atropos.run,
    "reward": rewards.run,
    "training": training,
    "replay": replay.run,
}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no broker stays
    chosen = sys.argv[1:] or list(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        broker = local_kafka.start(Path(folder), free_port())
        try:
            started = time.monotonic()
            for name in chosen:
                prefix = f"{name}."
                PARTS[name](Connection(bootstrap=broker.bootstrap, topic_prefix=prefix))
            print(f"\n{time.monotonic() - started:.0f} s in all")
        finally:
            local_kafka.stop(Path(folder))


if __name__ == "__main__":
    main()
