"""`steplog demo`: makes a model, starts a stack, runs agents and shows how the model learns."""

import asyncio
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live

from pool.connection import Connection
from servicekit.command_line import print_line
from servicekit.errors import Fatal
from steplog.demo import model
from steplog.demo.agent import DemoAgents
from steplog.demo.engine import choose_engine
from steplog.demo.log_watch import LogWatch
from steplog.demo.plan import CONCURRENT_GROUPS, GROUP_SIZE, RUN, Ports, demo_plan, write_settings
from steplog.demo.settings import DemoSettings
from steplog.demo.summary import show
from steplog.demo.view import DemoLines, DemoView
from steplog.stack import stack
from steplog.stack.state import StackFolder

LOOK_EVERY = 0.25
FRAMES_PER_SECOND = 4
MAX_RESTARTS = 3
"""Restarts of one part after which the demo gives up."""
RUN_FILE = "demo.json"
HOST = "127.0.0.1"


class DemoRun(NamedTuple):
    """What a resumed run needs to know, stored in demo.json."""

    ports: Ports
    target: int


def run(settings: DemoSettings) -> int:
    for needed in ("torch", "vllm"):
        if find_spec(needed) is None:  # importing them takes seconds
            raise ModuleNotFoundError(name=needed)
    directory = settings.dir.resolve()
    stack.down(directory / "stack")
    demo_run = _prepare(settings, directory)
    engine = choose_engine()
    config = write_settings(settings, engine, directory, demo_run.ports, demo_run.target)
    model.prepare(directory / "model")
    watch, console = LogWatch(), Console()
    plan = demo_plan(engine, directory, config)
    console.print(f"Running on: {engine.description}.", style="dim")
    try:
        folder = stack.up(directory / "stack", plan)
        with _showing(watch, folder, demo_run.target, console) as print_changes:
            asyncio.run(_learn(settings, watch, folder, demo_run, print_changes))
    finally:
        if not settings.keep:
            console.print("Stopping everything …", style="dim")
            stack.down(directory / "stack")
    return show(console, settings, directory, watch)


def _prepare(settings: DemoSettings, directory: Path) -> DemoRun:
    """A new run in an empty folder, or the earlier run that is to be resumed."""
    run_file = directory / RUN_FILE
    if directory.exists() and any(directory.iterdir()) and not run_file.exists():
        raise Fatal(f"{directory} holds files that are not the demo's. Choose another --dir.")
    if settings.resume:
        if not run_file.exists():
            raise Fatal(f"There is no earlier run in {directory} to resume.")
        saved = json.loads(run_file.read_text())
        target, done = saved["target"], _newest_checkpoint(directory)
        target = target if done < target else done + settings.versions
        demo_run = DemoRun(Ports(*saved["ports"]), target)
    else:
        shutil.rmtree(directory, ignore_errors=True)
        demo_run = DemoRun(Ports(*_free_ports(len(Ports._fields))), settings.versions)
    (directory / "model").mkdir(parents=True, exist_ok=True)
    run_file.write_text(json.dumps(demo_run._asdict()) + "\n")
    return demo_run


def _newest_checkpoint(directory: Path) -> int:
    """The newest saved version; an interrupted run has fewer versions than its target."""
    names = [folder.name for folder in (directory / "checkpoints" / RUN).glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def _showing(
    watch: LogWatch, folder: StackFolder, target: int, console: Console
) -> Iterator[Callable[[], None]]:
    """Yields a function to call from time to time; the live view of a terminal refreshes by itself."""
    if not console.is_terminal:
        yield DemoLines(watch, folder, print_line).print_changes
        return
    view = DemoView(watch, folder, target)
    with Live(view, console=console, refresh_per_second=FRAMES_PER_SECOND):
        yield lambda: None


async def _learn(
    settings: DemoSettings,
    watch: LogWatch,
    folder: StackFolder,
    run: DemoRun,
    print_changes: Callable[[], None],
) -> None:
    deadline = time.monotonic() + settings.limit_s
    connection = Connection(bootstrap=f"{HOST}:{run.ports.kafka}")
    agents = DemoAgents(
        f"http://{HOST}:{run.ports.gateway}", GROUP_SIZE, CONCURRENT_GROUPS, watch.add_conversation
    )

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            print_changes()
            _check(folder, deadline)
            if work is not None and work.done():
                work.result()
            await asyncio.sleep(LOOK_EVERY)

    work: asyncio.Task[None] | None = None
    async with AsyncExitStack() as opened:
        await until(lambda: _phase(folder, "topics") == "ended")
        await opened.enter_async_context(watch.following(connection))
        # The engine's weights are random until the trainer has sent the first version.
        await until(lambda: _is_ready(folder) and watch.is_fresh)
        work = asyncio.create_task(agents.work())
        try:
            await until(lambda: _is_trained(folder))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await asyncio.sleep(1)  # for the last records to arrive
        print_changes()


def _phase(folder: StackFolder, part: str) -> str | None:
    state = folder.state
    return state.parts[part].phase if state is not None else None


def _is_ready(folder: StackFolder) -> bool:
    state = folder.state
    return state is not None and state.is_settled()


def _is_trained(folder: StackFolder) -> bool:
    return _phase(folder, "train") == "ended"


def _check(folder: StackFolder, deadline: float) -> None:
    state = folder.state
    if state is None or not folder.is_supervised():
        raise Fatal(f"The supervisor has ended; see {folder.log('supervisor')}.")
    for name, part in state.parts.items():
        if part.restarts >= MAX_RESTARTS:
            raise Fatal(f"{name} keeps failing; see {folder.log(name)}.")
    if time.monotonic() > deadline:
        raise Fatal(f"The demo did not finish in time (--limit-s); see {folder.logs}.")
