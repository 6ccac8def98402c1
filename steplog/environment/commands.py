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

from servicekit.settings_sources import SettingsError, SettingsScope, add_options, load
from steplog.environment import serving
from steplog.environment.authors import blamed, told
from steplog.environment.environment import Environment, settings_class
from steplog.environment.errors import EnvironmentFailed

SERVICE = "env"
USAGE = "steplog env FILE.py:ENVIRONMENT serve, process or evaluate"
HOUSE = SettingsScope((SERVICE,), None)
INTERRUPTED = 130
Act = Callable[[Environment[Any], asyncio.Event], Coroutine[Any, Any, int]]


async def serve(environment: Environment[Any], stop: asyncio.Event) -> int:
    done = await serving.serve(environment, stop)
    _say(
        f"{done:,} groups are done; {serving.home(environment) / 'rollouts.html'} shows the newest"
    )
    return 0


async def process(environment: Environment[Any], stop: asyncio.Event) -> int:
    folder = await serving.process(environment, stop)
    _say(
        f"{folder / 'rollouts.jsonl'} has every group, {folder / 'rollouts.html'} shows the newest"
    )
    return INTERRUPTED if stop.is_set() else 0


async def evaluate(environment: Environment[Any], stop: asyncio.Event) -> int:
    found = await serving.evaluate(environment, stop)
    table = Table("metric", "value")
    for name, value in found.metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    _say(f"{found.folder / 'metrics.json'}, samples.jsonl and samples.html have all of it")
    return INTERRUPTED if stop.is_set() else 0


COMMANDS: dict[str, tuple[Act, str]] = {
    "serve": (serve, "make groups for a trainer, through the gateway"),
    "process": (process, "make groups with any OpenAI-style URL, into files"),
    "evaluate": (evaluate, "try what is held out, in channel val or at any OpenAI-style URL"),
}


def run(words: Sequence[str]) -> int:
    """`steplog env FILE.py:ENVIRONMENT COMMAND …`."""
    if words and words[0] in ("-h", "--help"):
        _say(f"usage: {USAGE}; with --help after any of them, all of its settings")
        return 0
    if not words or ":" not in words[0]:
        return _fail(2, f"give an environment and what to do: {USAGE}")
    try:
        cls = load_environment(words[0])
    except EnvironmentFailed as error:
        return _fail(2, str(error))
    return main(cls, words[1:], prog=f"steplog env {words[0]}")


def load_environment(spec: str) -> type[Environment[Any]]:
    where, _, name = spec.rpartition(":")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where)
    except SystemExit as error:
        raise EnvironmentFailed(
            f"{where} ends itself when it is loaded: "
            'its .cli() belongs under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:  # the author's code runs
        raise EnvironmentFailed(f"{where} cannot be loaded: {told(error)}") from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise EnvironmentFailed(f"{where} has no environment {name}: {USAGE}")
    return found


def _from_file(file: Path) -> ModuleType:
    name = f"steplog_environment_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(file.resolve().parent))  # as for a script
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return import_module(name)


def main(
    cls: type[Environment[Any]], argv: Sequence[str] | None = None, prog: str | None = None
) -> int:
    try:
        namespace = _parser(cls, prog).parse_args(argv)
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", handlers=[Lines()])
        settings = load(settings_class(cls), SERVICE, namespace, os.environ, HOUSE)
        with blamed(f"{cls.__name__}(settings)"):
            environment = cls(settings)
        return asyncio.run(_until_stopped(namespace.act_, environment))
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


def _parser(cls: type[Environment[Any]], prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description=cls.__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (act, help_) in COMMANDS.items():
        leaf = commands.add_parser(name, help=help_, description=help_, allow_abbrev=False)
        leaf.set_defaults(act_=act)
        add_options(leaf, settings_class(cls))
    return parser


async def _until_stopped(act: Act, environment: Environment[Any]) -> int:
    """The first signal asks it to finish what runs, the second to leave that. The third ends the
    process at once, also where the author's code blocks the loop, which then hears of none."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def ask() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    signals = count(1)

    def hear(*_: object) -> None:
        if next(signals) > 2:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(ask)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hear)
    try:
        return await act(environment, stop)
    except asyncio.CancelledError:
        return INTERRUPTED


class Lines(logging.Handler):
    """Looks for the stream at each line: while there is a live bar, another stands in its place, which
    puts lines above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _fail(status: int, *sentences: str) -> int:
    for sentence in sentences:
        sys.stderr.write(f"{sentence}\n")
    return status
