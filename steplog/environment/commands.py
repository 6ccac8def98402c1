"""The command line of an environment: `steplog env FILE.py:ENVIRONMENT serve`, or the file's own."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from servicekit.command_line import INTERRUPTED, print_line
from servicekit.settings_sources import SettingsError, SettingsScope, add_options, load
from steplog.environment import serving
from steplog.environment.author_code import describe_error, required_call
from steplog.environment.base import BaseEnvironment, settings_class
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.running import weight_versions

SERVICE = "env"
USAGE = "steplog env FILE.py:ENVIRONMENT {serve,process,evaluate}"
SCOPE = SettingsScope((SERVICE,), None)
Action = Callable[[BaseEnvironment[Any], asyncio.Event], Coroutine[Any, Any, int]]


async def serve(environment: BaseEnvironment[Any], stop: asyncio.Event) -> int:
    done = await serving.serve(environment, stop)
    page = serving.home(environment) / "rollouts.html"
    print_line(f"{done:,} groups are done. {page} shows the newest ones.")
    return 0


async def process(environment: BaseEnvironment[Any], stop: asyncio.Event) -> int:
    folder = await serving.process(environment, stop)
    print_line(
        f"All groups are in {folder / 'rollouts.jsonl'}; {folder / 'rollouts.html'} shows the "
        "newest ones."
    )
    return INTERRUPTED if stop.is_set() else 0


async def evaluate(environment: BaseEnvironment[Any], stop: asyncio.Event) -> int:
    result = await serving.evaluate(environment, stop)
    table = Table("metric", "value")
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    print_line(weight_versions.describe(result.versions))
    print_line(
        f"The metrics are in {result.folder / 'metrics.json'}, the rollouts in samples.jsonl and "
        "samples.html next to it."
    )
    return INTERRUPTED if stop.is_set() else 0


COMMANDS: dict[str, tuple[Action, str]] = {
    "serve": (serve, "make groups for a trainer, through the gateway"),
    "process": (process, "make groups with any OpenAI-style URL, into files"),
    "evaluate": (
        evaluate,
        "run the held-out items, in the channel val or with an OpenAI-style URL",
    ),
}


def run(words: Sequence[str]) -> int:
    """`steplog env FILE.py:ENVIRONMENT COMMAND …`."""
    if words and words[0] in ("-h", "--help"):
        print_line(f"usage: {USAGE} [options]")
        print_line("Add --help after serve, process or evaluate to see all settings.")
        return 0
    if not words or ":" not in words[0]:
        return _fail(2, f"Name an environment and a command: {USAGE}")
    try:
        cls = load_environment(words[0])
    except EnvironmentFailed as error:
        return _fail(2, str(error))
    return main(cls, words[1:], prog=f"steplog env {words[0]}")


def load_environment(spec: str) -> type[BaseEnvironment[Any]]:
    """The class that `FILE.py:NAME` or `MODULE:NAME` refers to."""
    source, _, name = spec.rpartition(":")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    except SystemExit as error:
        raise EnvironmentFailed(
            f"{source} exits when it is loaded. Put its call of .cli() under "
            '`if __name__ == "__main__":`.'
        ) from error
    except Exception as error:  # the author's code runs
        raise EnvironmentFailed(f"{source} cannot be loaded: {describe_error(error)}") from error
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, BaseEnvironment)):
        raise EnvironmentFailed(f"{source} has no environment named {name}. Usage: {USAGE}")
    return cls


def _load_file(file: Path) -> ModuleType:
    name = f"steplog_environment_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(file.resolve().parent))  # as for a script
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return import_module(name)


def main(
    cls: type[BaseEnvironment[Any]], argv: Sequence[str] | None = None, prog: str | None = None
) -> int:
    try:
        namespace = _parser(cls, prog).parse_args(argv)
        handler = CurrentStderrHandler()
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
        settings = load(settings_class(cls), SERVICE, namespace, os.environ, SCOPE)
        with required_call(f"{cls.__name__}(settings)"):
            environment = cls(settings)
        return asyncio.run(_run_until_stopped(namespace.action_, environment))
    except SettingsError as error:
        return _fail(2, *error.problems)
    except EnvironmentFailed as error:
        return _fail(1, str(error))
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(1, f"{error.filename} cannot be used: {error.strerror}")
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser(cls: type[BaseEnvironment[Any]], prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description=cls.__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (action, help_) in COMMANDS.items():
        leaf = commands.add_parser(name, help=help_, description=help_, allow_abbrev=False)
        leaf.set_defaults(action_=action)
        add_options(leaf, settings_class(cls))
    return parser


async def _run_until_stopped(action: Action, environment: BaseEnvironment[Any]) -> int:
    """The first signal asks to finish the running groups, the second to cancel them. The third ends the
    process at once, even if the author's code blocks the event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def request_stop() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    signals = count(1)

    def on_signal(*_: object) -> None:
        if next(signals) > 2:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(request_stop)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        return await action(environment, stop)
    except asyncio.CancelledError:
        return INTERRUPTED


class CurrentStderrHandler(logging.Handler):
    """Writes to whatever sys.stderr is at the moment: a live view replaces it, and prints the lines
    above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


def _fail(status: int, *sentences: str) -> int:
    for sentence in sentences:
        sys.stderr.write(f"{sentence}\n")
    return status
