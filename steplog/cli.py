"""The `steplog` command: one table of commands, each a function of its service's settings.

Settings, and the services behind them, are imported for the chosen command only, so that help is
quick. A function returns the exit status. What a person can mend is one sentence on stderr, with
status 1, or 2 when it is about usage or settings.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from servicekit import distribution

if TYPE_CHECKING:
    from console.settings import LagSettings, MonitorSettings
    from gateway.atropos.settings import AtroposSettings
    from gateway.settings import GatewaySettings
    from replay.settings import DeleteSettings, DiffSettings, ImportSettings, LineageSettings
    from replay.settings import ExportSettings as ReplayExportSettings
    from reward.settings import RescoreSettings, RewardSettings
    from steplog.cat import CatSettings
    from steplog.demo.settings import DemoSettings
    from steplog.kafka.local_kafka import Broker, LocalKafkaSettings
    from steplog.key import KeySettings
    from steplog.stack.settings import StackSettings
    from steplog.topics import TopicsSettings
    from trainer.replaying.settings import ReplayStepSettings
    from trainer.settings import ExportSettings, TrainSettings

INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143
"""What a shell reports of a program that SIGINT, SIGPIPE or SIGTERM ended."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def say_now(line: str) -> None:
    say(line)
    sys.stdout.flush()


def kafka_start(settings: "LocalKafkaSettings") -> int:
    from steplog.kafka import local_kafka

    running = local_kafka.status(settings.dir)
    broker = local_kafka.start(settings.dir, settings.port, settings.heap)
    say(f"{'already running' if running else 'started'}: {_describe(broker)}")
    return 0


def kafka_stop(settings: "LocalKafkaSettings") -> int:
    from steplog.kafka import local_kafka

    broker = local_kafka.stop(settings.dir)
    say(f"stopped: {_describe(broker)}" if broker else f"no broker runs in {settings.dir}")
    return 0


def kafka_status(settings: "LocalKafkaSettings") -> int:
    from steplog.kafka import local_kafka

    broker = local_kafka.status(settings.dir)
    say(f"running: {_describe(broker)}" if broker else f"no broker runs in {settings.dir}")
    return 0 if broker else 1


def topics_create(settings: "TopicsSettings") -> int:
    from steplog import topics

    topics.create(settings, say)
    return 0


def topics_list(settings: "TopicsSettings") -> int:
    from steplog import topics

    topics.show(settings, say)
    return 0


def topics_check(settings: "TopicsSettings") -> int:
    from steplog import topics

    topics.check(settings, say)
    return 0


def cat(settings: "CatSettings") -> int:
    from steplog import cat as cat_

    cat_.cat(settings, say_now if settings.follow else say)
    return 0


def gateway(settings: "GatewaySettings") -> int:
    from gateway import service

    return service.serve(settings)


def atropos(settings: "AtroposSettings") -> int:
    from gateway.atropos import service

    return service.serve(settings)


def reward(settings: "RewardSettings") -> int:
    from reward import service

    service.serve(settings)
    return 0


def replay_rescore(settings: "RescoreSettings") -> int:
    from reward import rescore

    return 0 if rescore.rescore(settings, say_now) else INTERRUPTED


def replay_diff(settings: "DiffSettings") -> int:
    from replay.diff import command

    command.diff(settings, say)
    return 0


def train(settings: "TrainSettings") -> int:
    with _torch_is_needed():
        from trainer import service
    told = service.serve(settings)
    if told is not None:
        say(told)
    return 0


def export(settings: "ExportSettings") -> int:
    with _torch_is_needed():
        from trainer import export as export_
    say(export_.export(settings))
    return 0


def replay_step(settings: "ReplayStepSettings") -> int:
    with _torch_is_needed():
        from trainer.replaying import step as step_

        return 0 if step_.step(settings, say) else 1


def replay_lineage(settings: "LineageSettings") -> int:
    from replay.lineage import command

    command.lineage(settings, say)
    return 0


@contextmanager
def _torch_is_needed() -> Iterator[None]:
    from servicekit.errors import Fatal

    try:
        yield
    except ModuleNotFoundError as error:
        raise Fatal(
            f"This needs the package {error.name}: {distribution.install_command('gpu')}; "
            f"without a GPU, {distribution.install_command('cpu')}"
        ) from error


def lag(settings: "LagSettings") -> int:
    from console import lag as lag_

    lag_.lag(settings, say_now)
    return 0


def monitor(settings: "MonitorSettings") -> int:
    from console import monitor as monitor_

    monitor_.serve(settings)
    return 0


def replay_export(settings: "ReplayExportSettings") -> int:
    from replay.export import command

    say(command.export(settings))
    return 0


def replay_import(settings: "ImportSettings") -> int:
    from replay.importer import command

    say(command.import_files(settings))
    return 0


def replay_delete(settings: "DeleteSettings") -> int:
    from replay.deletion import command

    command.delete(settings, say_now)
    return 0


def up(settings: "StackSettings") -> int:
    from steplog.stack import commands

    return commands.up(settings, say_now)


def down(settings: "StackSettings") -> int:
    from steplog.stack import commands

    return commands.down(settings, say_now)


def status(settings: "StackSettings") -> int:
    from steplog.stack import commands

    return commands.status(settings, say)


def demo(settings: "DemoSettings") -> int:
    with _torch_is_needed():
        from steplog.demo import demo as demo_

        return demo_.run(settings)


def key(settings: "KeySettings") -> int:
    from steplog import key as key_

    key_.make(settings, say)
    return 0


def _describe(broker: "Broker") -> str:
    return f"Kafka {broker.version} on {broker.bootstrap}, pid {broker.pid}, in {broker.directory}"


@dataclass(frozen=True)
class Command:
    """What `steplog WORDS…` does, and whose settings it takes (a key of `settings.SERVICES`)."""

    words: tuple[str, ...]
    help: str
    service: str
    run: Callable[[Any], int]


ENVIRONMENT = "env"
GROUPS = {
    "kafka": "a local broker, for development and tests",
    "topics": "the topics of the log",
    "replay": "the log read again: scored anew, compared, what made which weights, as files",
}
COMMANDS = [
    Command(("kafka", "start"), "start the local broker", "kafka", kafka_start),
    Command(("kafka", "stop"), "stop it; the data stay", "kafka", kafka_stop),
    Command(("kafka", "status"), "say whether it runs (status 1: no)", "kafka", kafka_status),
    Command(("topics", "create"), "make the topics that are missing", "topics", topics_create),
    Command(("topics", "list"), "show what the cluster has of them", "topics", topics_list),
    Command(("topics", "check"), "refuse a cluster that does not fit", "topics", topics_check),
    Command(("gateway",), "serve agents, and record their calls", "gateway", gateway),
    Command(("atropos",), "serve Atropos environments and trainers", "atropos", atropos),
    Command(("reward",), "score trajectories into the second topic", "reward", reward),
    Command(
        ("replay", "rescore"),
        "score a part of the log again, into a topic of its own",
        "replay-rescore",
        replay_rescore,
    ),
    Command(("replay", "diff"), "compare two sets of rewards", "replay-diff", replay_diff),
    Command(("train",), "train on what was scored, and update the engines", "train", train),
    Command(("export",), "make a Hugging Face folder of a checkpoint", "export", export),
    Command(("replay", "step"), "make a version's step again", "replay-step", replay_step),
    Command(
        ("replay", "lineage"),
        "say what became of a trajectory, and why",
        "replay-lineage",
        replay_lineage,
    ),
    Command(("replay", "export"), "write trajectories to files", "replay-export", replay_export),
    Command(("replay", "import"), "append files to the log", "replay-import", replay_import),
    Command(("replay", "delete"), "copy the log without some data", "replay-delete", replay_delete),
    Command(("lag",), "show how far every consumer group is behind", "lag", lag),
    Command(("monitor",), "serve lag and waiting work to Prometheus", "monitor", monitor),
    Command(("up",), "start the whole stack, and keep it running", "stack", up),
    Command(("down",), "end the whole stack, in order", "stack", down),
    Command(("status",), "show the stack's processes (status 1: not all ready)", "stack", status),
    Command(("demo",), "watch a small model learn, on this machine", "demo", demo),
    Command(("key",), "make an API key for the gateway", "key", key),
    Command(("cat",), "show the records of a topic as JSON lines", "cat", cat),
]


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    termination = Termination()
    try:
        with termination:
            try:
                return _run(words)
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return TERMINATED if termination.came else INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has no reader; Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


class Termination:
    """SIGTERM does what Ctrl-C does, so that a command is interrupted in one way only."""

    came = False

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        self.came = True
        on_interrupt = signal.getsignal(signal.SIGINT)
        if not callable(on_interrupt):  # shells make background jobs ignore Ctrl-C
            on_interrupt = signal.default_int_handler
        on_interrupt(signal.SIGINT, frame)


def _run(words: list[str]) -> int:
    if words[:1] == [ENVIRONMENT]:
        from steplog.environment import commands

        return commands.run(words[1:])
    namespace = _parser(words).parse_args(words)
    command: Command = namespace.command_
    from schemas import SchemaError
    from schemas.registry import RegistryUnavailable
    from servicekit.errors import SteplogError
    from steplog.kafka.software import LocalKafkaError
    from steplog.settings import SettingsError, load, settings_class

    try:
        cls = settings_class(command.service)
        return command.run(load(cls, command.service, namespace, os.environ))
    except SettingsError as error:
        return _fail(2, *error.problems)
    except (SteplogError, LocalKafkaError, RegistryUnavailable, SchemaError) as error:
        return _fail(1, str(error))


def _fail(status: int, *sentences: str) -> int:
    from servicekit import logs

    for sentence in sentences:
        if logs.is_json():
            logging.getLogger("steplog").critical(sentence)
        else:
            sys.stderr.write(f"steplog: {sentence}\n")
    return status


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The whole tree of commands; only the one that `words` name has its options."""
    parser = argparse.ArgumentParser(
        prog="steplog",
        description="A Kafka log between LLM agents and the trainer that learns from them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"steplog {distribution.version()}")
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    groups = {}
    for name, help_ in GROUPS.items():
        group = top.add_parser(name, help=help_, description=help_, allow_abbrev=False)
        groups[name] = group.add_subparsers(metavar="COMMAND", required=True)
    # Only for the list: an environment has settings of its own.
    top.add_parser(ENVIRONMENT, help="serve, process or evaluate FILE.py:ENVIRONMENT")
    for command in COMMANDS:
        *group_, name = command.words
        level = groups[group_[0]] if group_ else top
        leaf = level.add_parser(
            name, help=command.help, description=command.help, allow_abbrev=False
        )
        leaf.set_defaults(command_=command)
        if tuple(words[: len(command.words)]) == command.words:
            _add_options(leaf, command.service)
    return parser


def _add_options(parser: argparse.ArgumentParser, service: str) -> None:
    from steplog.settings import add_options, settings_class

    add_options(parser, settings_class(service))
