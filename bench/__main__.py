"""`make bench`: what the log costs, each line as a ratio to the raw client in the same run."""

import socket
import tempfile
import time
from pathlib import Path

from bench import consume, memory, produce, size
from pool.connection import Connection
from steplog import local_kafka


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        broker = local_kafka.start(Path(folder), free_port())
        try:
            connection = Connection(bootstrap=broker.bootstrap)
            started = time.monotonic()
            size.run()
            produce.run(connection)
            consume.run(connection)
            memory.run(connection.model_copy(update={"topic_prefix": "memory."}))
            print(f"\n{time.monotonic() - started:.0f} s in all")
        finally:
            local_kafka.stop(Path(folder))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
