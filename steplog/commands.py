"""The table of commands. The parser, the settings and docs/settings.md are made from it.

Classes and functions are named as "module:name" and imported when a command runs, so that
`steplog --help` stays quick. An entry function takes its settings and returns an exit status, or a last
line to print, or nothing; the last two mean status 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Command:
    path: str
    """What is typed after `steplog`: one word, or a group and a word."""
    service: str
    """Whose settings it reads: the file's table `[service]`, the variables `STEPLOG_SERVICE_…`."""
    settings: str
    """The settings class, as "module:Class"; the same for all commands of a service."""
    entry: str
    """The function that runs the command, as "module:function"."""
    help: str
    parses_arguments: bool = False
    """The entry function gets the arguments after the path instead of settings."""

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.path.split())


GROUPS = {
    "kafka": "run a local Kafka broker, for development and tests",
    "topics": "create, list and check the Kafka topics",
    "replay": "work with the recorded log: rescore, compare, trace, export, import, delete",
}
COMMANDS = [
    Command(
        "up",
        "stack",
        "steplog.stack.settings:StackSettings",
        "steplog.stack.commands:up",
        "start the whole stack on this machine and keep it running",
    ),
    Command(
        "status",
        "stack",
        "steplog.stack.settings:StackSettings",
        "steplog.stack.commands:status",
        "show the stack's processes (exit status 1 unless all are ready)",
    ),
    Command(
        "down",
        "stack",
        "steplog.stack.settings:StackSettings",
        "steplog.stack.commands:down",
        "stop the whole stack",
    ),
    Command(
        "demo",
        "demo",
        "steplog.demo.settings:DemoSettings",
        "steplog.demo.demo:run",
        "watch a small model learn on this machine, in a few minutes",
    ),
    Command(
        "kafka start",
        "kafka",
        "steplog.kafka.local_kafka:LocalKafkaSettings",
        "steplog.kafka.commands:start",
        "start the local broker",
    ),
    Command(
        "kafka stop",
        "kafka",
        "steplog.kafka.local_kafka:LocalKafkaSettings",
        "steplog.kafka.commands:stop",
        "stop the local broker and keep its data",
    ),
    Command(
        "kafka status",
        "kafka",
        "steplog.kafka.local_kafka:LocalKafkaSettings",
        "steplog.kafka.commands:status",
        "show whether the local broker is running (exit status 1 if not)",
    ),
    Command(
        "topics create",
        "topics",
        "steplog.topics:TopicsSettings",
        "steplog.topics:create",
        "create the topics that are missing",
    ),
    Command(
        "topics list",
        "topics",
        "steplog.topics:TopicsSettings",
        "steplog.topics:show",
        "list the topics, with their partitions and replicas",
    ),
    Command(
        "topics check",
        "topics",
        "steplog.topics:TopicsSettings",
        "steplog.topics:check",
        "check that the cluster has all topics in the right shape",
    ),
    Command(
        "gateway",
        "gateway",
        "gateway.settings:GatewaySettings",
        "gateway.service:serve",
        "serve LLM calls of agents and record them",
    ),
    Command(
        "atropos",
        "atropos",
        "gateway.atropos.settings:AtroposSettings",
        "gateway.atropos.service:serve",
        "serve the Atropos API to environments and trainers",
    ),
    Command(
        "key",
        "key",
        "steplog.key:KeySettings",
        "steplog.key:make",
        "create an API key for the gateway",
    ),
    Command(
        "env",
        "env",
        "steplog.environment.settings:EnvironmentSettings",
        "steplog.environment.commands:run",
        "run an environment: serve, process or evaluate FILE.py:ENVIRONMENT",
        parses_arguments=True,
    ),
    Command(
        "reward",
        "reward",
        "reward.settings:RewardSettings",
        "reward.worker.service:serve",
        "score finished trajectories",
    ),
    Command(
        "train",
        "train",
        "trainer.settings:TrainSettings",
        "trainer.service:serve",
        "train on scored trajectories and update the engines",
    ),
    Command(
        "export",
        "export",
        "trainer.settings:ExportSettings",
        "trainer.export:export",
        "turn a checkpoint into a Hugging Face model folder",
    ),
    Command(
        "lag",
        "lag",
        "console.settings:LagSettings",
        "console.lag:lag",
        "show how far each consumer group is behind",
    ),
    Command(
        "monitor",
        "monitor",
        "console.settings:MonitorSettings",
        "console.monitor:serve",
        "serve lag and backlog as Prometheus metrics",
    ),
    Command(
        "cat",
        "cat",
        "steplog.cat:CatSettings",
        "steplog.cat:cat",
        "print the records of a topic as JSON lines",
    ),
    Command(
        "replay rescore",
        "replay-rescore",
        "reward.settings:RescoreSettings",
        "reward.rescore.command:rescore",
        "score part of the log again, into a separate topic",
    ),
    Command(
        "replay diff",
        "replay-diff",
        "replay.settings:DiffSettings",
        "replay.diff.command:diff",
        "compare two sets of rewards",
    ),
    Command(
        "replay lineage",
        "replay-lineage",
        "replay.settings:LineageSettings",
        "replay.lineage.command:lineage",
        "show what happened to a trajectory and why",
    ),
    Command(
        "replay step",
        "replay-step",
        "trainer.reproduction.settings:ReplayStepSettings",
        "trainer.reproduction.command:replay_step",
        "repeat the training step that made a version, and compare",
    ),
    Command(
        "replay export",
        "replay-export",
        "replay.settings:DatasetExportSettings",
        "replay.export.command:export",
        "write trajectories to Parquet or JSON files",
    ),
    Command(
        "replay import",
        "replay-import",
        "replay.settings:ImportSettings",
        "replay.importer.command:import_files",
        "append trajectories from files to the log",
    ),
    Command(
        "replay delete",
        "replay-delete",
        "replay.settings:DeleteSettings",
        "replay.deletion.command:delete",
        "copy the log without certain data",
    ),
]


def find_command(words: Sequence[str], commands: Sequence[Command] = COMMANDS) -> Command | None:
    """The command that a command line begins with."""
    return next((c for c in commands if tuple(words[: len(c.words)]) == c.words), None)


def load_object(reference: str) -> Any:
    """Import what a "module:name" refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
