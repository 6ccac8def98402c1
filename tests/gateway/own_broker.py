"""A broker for one test file, that may be killed, stopped and cut off. What is produced to it goes
through a proxy: its advertised address is the proxy's."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import AdminClient

from pool.connection import Connection
from steplog.kafka import broker_directory
from steplog.kafka.broker_directory import HOST, PROPERTIES
from tests.brokers import java
from tests.conftest import free_port, pause_and_wait
from tests.gateway.tcp_proxy import Proxy, running_proxy

CLUSTER = "AAAAAAAAAAAAAAAAAAAAAg"
START_LIMIT_S = 60


class OwnBroker:
    """Made by `own_broker`. `direct` goes past the proxy, for the test itself."""

    def __init__(self, directory: Path, port: int, proxy: Proxy) -> None:
        self.proxy = proxy
        self.bootstrap = f"{HOST}:{proxy.port}"
        self.direct = f"{HOST}:{port}"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._directory / "broker.log").open("a") as log:
            self._process = subprocess.Popen(
                java("kafka.Kafka", PROPERTIES), cwd=self._directory, stdout=log, stderr=log
            )
        quiet = {"log_level": 0, "reconnect.backoff.max.ms": 200}
        admin = AdminClient({"bootstrap.servers": self.direct, **quiet})
        admin.list_topics(timeout=START_LIMIT_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        pause_and_wait(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def connection(self, prefix: str) -> Connection:
        """For the gateway: through the proxy."""
        return Connection(bootstrap=self.bootstrap, topic_prefix=prefix)

    def past_the_proxy(self, connection: Connection) -> Connection:
        return connection.model_copy(update={"bootstrap": self.direct})


@contextmanager
def own_broker(directory: Path) -> Iterator[OwnBroker]:
    proxied, inner, direct, controller = (free_port() for _ in range(4))
    settings = broker_directory._settings("data", direct, controller) | {
        "listeners": f"PLAINTEXT://{HOST}:{direct},PROXIED://{HOST}:{inner},"
        f"CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{direct},PROXIED://{HOST}:{proxied}",
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT"
        ),
        "inter.broker.listener.name": "PLAINTEXT",
    }
    lines = [f"{name}={value}\n" for name, value in settings.items()]
    (directory / PROPERTIES).write_text("".join(lines))
    tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={CLUSTER}"]
    tool = java(*tool, f"--config={PROPERTIES}")
    subprocess.run(tool, cwd=directory, check=True, capture_output=True)
    with running_proxy(proxied, inner) as proxy:
        broker = OwnBroker(directory, direct, proxy)
        try:
            broker.start()
            yield broker
        finally:
            broker.kill()
