"""The `steplog` command: finds the command in the table, loads its settings and runs it.

Errors that a user can fix are printed as one sentence each on stderr. The exit status is 2 for wrong
usage or settings, and 1 for all other errors.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from servicekit import distribution
from servicekit.command_line import BROKEN_PIPE, INTERRUPTED, TERMINATED, print_line
from servicekit.errors import SteplogError
from steplog.commands import COMMANDS, GROUPS, Command, find_command, load_object
from steplog.shadowing import explain_shadowing

TORCH_PACKAGES = {"torch", "vllm", "safetensors"}
"""Installed by the extras `gpu` and `cpu` only."""


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
        return TERMINATED if termination.was_requested else INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has no reader; Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


class Termination:
    """Makes SIGTERM do what Ctrl-C does, so that commands handle one kind of interruption only."""

    was_requested = False

    def __enter__(self) -> None:
        self._previous_handler = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous_handler)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        self.was_requested = True
        on_interrupt = signal.getsignal(signal.SIGINT)
        if not callable(on_interrupt):  # shells make background jobs ignore Ctrl-C
            on_interrupt = signal.default_int_handler
        on_interrupt(signal.SIGINT, frame)


def _run(words: list[str]) -> int:
    if (problem := explain_shadowing()) is not None:
        return _fail(1, problem)
    command = find_command(words, COMMANDS)
    if command is not None and command.parses_arguments:
        status: int = load_object(command.entry)(words[len(command.words) :])
        return status
    try:
        namespace = make_parser(words).parse_args(words)
        return _execute(namespace.command_, namespace)
    except SteplogError as error:
        return _fail(1, str(error))
    except ModuleNotFoundError as error:
        if error.name not in TORCH_PACKAGES:
            raise
        return _fail(
            1,
            f"This command needs the package {error.name}. Install it with "
            f"`{distribution.install_command('gpu')}`, or on a machine without a GPU with "
            f"`{distribution.install_command('cpu')}`.",
        )


def _execute(command: Command, namespace: argparse.Namespace) -> int:
    from schemas import SchemaError
    from schemas.registry import RegistryUnavailable
    from steplog.settings import SettingsError, load

    try:
        settings = load(load_object(command.settings), command.service, namespace, os.environ)
        result: int | str | None = load_object(command.entry)(settings)
    except SettingsError as error:
        return _fail(2, *error.problems)
    except (RegistryUnavailable, SchemaError) as error:
        return _fail(1, str(error))
    if isinstance(result, str):
        print_line(result)
    return result if isinstance(result, int) else 0


def _fail(status: int, *sentences: str) -> int:
    from servicekit import logs

    for sentence in sentences:
        if logs.is_json():
            logging.getLogger("steplog").critical(sentence)
        else:
            sys.stderr.write(f"steplog: {sentence}\n")
    return status


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands. Only the command that `words` begin with gets its options."""
    parser = argparse.ArgumentParser(
        prog="steplog",
        description="A Kafka log between LLM agents and the trainer that learns from them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"steplog {distribution.version()}")
    top = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups = {}
    chosen = find_command(words, COMMANDS)
    for command in COMMANDS:
        *group, name = command.words
        if group and group[0] not in groups:
            help_ = GROUPS[group[0]]
            member = top.add_parser(
                group[0], help=help_, description=_as_sentence(help_), allow_abbrev=False
            )
            groups[group[0]] = member.add_subparsers(
                title="commands", metavar="COMMAND", required=True
            )
        leaf = (groups[group[0]] if group else top).add_parser(
            name, help=command.help, description=_as_sentence(command.help), allow_abbrev=False
        )
        leaf.set_defaults(command_=command)
        if command is chosen and not command.parses_arguments:
            _add_options(leaf, command)
    return parser


def _as_sentence(help_: str) -> str:
    return f"{help_[:1].upper()}{help_[1:]}."


def _add_options(parser: argparse.ArgumentParser, command: Command) -> None:
    from steplog.settings import add_options

    add_options(parser, load_object(command.settings))
