"""State shared by the programs that a page runs, kept in a file."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
PORTS = {"gateway": 8100, "reward": 8200, "train": 8300, "monitor": 8400}
KAFKA_TOOLS = {
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
}
"""Kafka's own commands that the jars of the local broker include, with their Java classes."""


@dataclass
class State:
    bootstrap: str
    prefix: str
    group: str
    kafka_port: int
    engine: str
    tokenizer: str
    ports: dict[str, int]
    own_broker: bool = False
    """The page has started its own broker, whose topics have the default prefix."""
    running: dict[str, int] = field(default_factory=dict)
    """Pids of the services that the page has started, by name."""

    def variables(self) -> dict[str, str]:
        own_broker = f"127.0.0.1:{self.kafka_port}", "steplog."
        bootstrap, prefix = own_broker if self.own_broker else (self.bootstrap, self.prefix)
        log = {"STEPLOG_BOOTSTRAP": bootstrap, "STEPLOG_TOPIC_PREFIX": prefix}
        ports = {f"STEPLOG_{name.upper()}_PORT": str(port) for name, port in self.ports.items()}
        more = {"STEPLOG_KAFKA_PORT": str(self.kafka_port), "STEPLOG_REWARD_GROUP": self.group}
        return {**log, **ports, **more}


def read(file: Path) -> State:
    return State(**json.loads(file.read_text()))


def write(file: Path, state: State) -> None:
    file.write_text(json.dumps(asdict(state)))
