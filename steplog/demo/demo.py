"""`steplog demo`: makes a model, brings a stack up, lets agents work, shows what comes of it."""

import asyncio
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live

from pool.connection import Connection
from servicekit.errors import Fatal
from steplog.demo import model
from steplog.demo.agent import Agents
from steplog.demo.plan import AT_ONCE, GROUP_SIZE, RUN, Ports, demo_plan, write_settings
from steplog.demo.settings import DemoSettings
from steplog.demo.summary import show
from steplog.demo.view import Lines, View
from steplog.demo.watch import Watch
from steplog.stack import stack
from steplog.stack.state import Folder

LOOK_EVERY = 0.25
FRAMES = 4
"""Per second."""
FAILURES = 3
"""Restarts of one part after which there is no use in going on."""
MARK = "demo.json"
HOST = "127.0.0.1"


class Kept(NamedTuple):
    """What a later run has to know."""

    ports: Ports
    target: int


def run(settings: DemoSettings) -> int:
    for needed in ("torch", "vllm"):
        if find_spec(needed) is None:  # importing them takes seconds
            raise ModuleNotFoundError(name=needed)
    directory = settings.dir.resolve()
    stack.down(directory / "stack")
    kept = _prepare(settings, directory)
    config = write_settings(settings, directory, kept.ports, kept.target)
    model.prepare(directory / "model")
    watch, console = Watch(), Console()
    plan = demo_plan(directory, config)
    try:
        folder = stack.up(directory / "stack", plan)
        with _shown(watch, folder, kept.target, console) as look:
            asyncio.run(_learn(settings, watch, folder, kept, look))
    finally:
        if not settings.keep:
            console.print("ending everything …", style="dim")
            stack.down(directory / "stack")
    return show(console, settings, directory, watch)


def _prepare(settings: DemoSettings, directory: Path) -> Kept:
    """An empty folder with ports of its own, or what an earlier run has left."""
    mark = directory / MARK
    if directory.exists() and any(directory.iterdir()) and not mark.exists():
        raise Fatal(f"{directory} holds files that are not the demo's; choose another --dir")
    if settings.resume:
        if not mark.exists():
            raise Fatal(f"there is nothing to go on with in {directory}")
        told = json.loads(mark.read_text())
        ports, before = Ports(*told["ports"]), told["target"]
        done = _checkpointed(directory)
        kept = Kept(ports, before if done < before else done + settings.versions)
    else:
        shutil.rmtree(directory, ignore_errors=True)
        kept = Kept(Ports(*_free_ports(len(Ports._fields))), settings.versions)
    (directory / "model").mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(kept._asdict()) + "\n")
    return kept


def _checkpointed(directory: Path) -> int:
    """The newest version that was saved; a run that was interrupted has fewer than it wanted."""
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
def _shown(
    watch: Watch, folder: Folder, target: int, console: Console
) -> Iterator[Callable[[], None]]:
    """What is to be called now and then. A terminal refreshes by itself."""
    if not console.is_terminal:
        yield Lines(watch, folder, _say).look
        return
    view = View(watch, folder, target)
    with Live(view, console=console, refresh_per_second=FRAMES):
        yield lambda: None


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _learn(
    settings: DemoSettings, watch: Watch, folder: Folder, kept: Kept, look: Callable[[], None]
) -> None:
    deadline = time.monotonic() + settings.limit_s
    connection = Connection(bootstrap=f"{HOST}:{kept.ports.kafka}")
    agents = Agents(f"http://{HOST}:{kept.ports.gateway}", GROUP_SIZE, AT_ONCE, watch.heard)

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            look()
            _check(folder, deadline)
            if work is not None and work.done():
                work.result()
            await asyncio.sleep(LOOK_EVERY)

    work: asyncio.Task[None] | None = None
    async with AsyncExitStack() as opened:
        await until(lambda: _phase(folder, "topics") == "ended")
        await opened.enter_async_context(watch.following(connection))
        # Until the trainer has sent the first version, the engine's weights are nobody's.
        await until(lambda: _is_ready(folder) and watch.is_fresh)
        work = asyncio.create_task(agents.work())
        try:
            await until(lambda: _ended(folder))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await asyncio.sleep(1)  # for the last records to come in
        look()


def _phase(folder: Folder, part: str) -> str | None:
    state = folder.state
    return state.parts[part].phase if state is not None else None


def _is_ready(folder: Folder) -> bool:
    state = folder.state
    return state is not None and state.is_settled()


def _ended(folder: Folder) -> bool:
    return _phase(folder, "train") == "ended"


def _check(folder: Folder, deadline: float) -> None:
    state = folder.state
    if state is None or not folder.is_supervised():
        raise Fatal(f"the supervisor is gone; see {folder.log('supervisor')}")
    for name, part in state.parts.items():
        if part.restarts >= FAILURES:
            raise Fatal(f"{name} does not stay up; see {folder.log(name)}")
    if time.monotonic() > deadline:
        raise Fatal(f"time is up; see {folder.logs}")
