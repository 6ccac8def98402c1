"""A stack as commands see it: bring it up, look at it, take it down."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from servicekit.errors import Fatal
from steplog.kafka import local_kafka
from steplog.processes import Process, wait_for
from steplog.stack.plan import Plan
from steplog.stack.state import Folder, PartState, State
from steplog.stack.supervisor import stop_parts

SUPERVISOR_LIMIT = 60.0
"""Seconds until a supervisor has written its first state; on a busy machine imports take long."""
LOOK_EVERY = 0.2
KAFKA_LIMIT = 90.0
"""A supervisor that starts the broker hears nothing else meanwhile."""

Told = Callable[[str, PartState], None]


def up(directory: Path, plan: Plan) -> Folder:
    """Starts the supervisor, unless one runs this very plan; it goes on without us. What a killed
    supervisor left behind is taken over."""
    folder = Folder(directory)
    folder.make()
    with folder.turn():
        _up(folder, plan)
    return folder


def _up(folder: Folder, plan: Plan) -> None:
    before, is_supervised = folder.plan, folder.is_supervised()
    if before is not None and before != plan and (is_supervised or remains(folder)):
        raise Fatal(
            f"the stack of {folder.path} runs with other settings; take it down first "
            f"(`steplog down --dir {folder.path}`)"
        )
    if not is_supervised:
        folder.plan = plan
        _start_supervisor(folder)


def remains(folder: Folder) -> list[str]:
    """Parts whose process runs, whether or not somebody looks after them."""
    state, plan = folder.state, folder.plan
    if state is None or plan is None:
        return []
    found = [state.parts.get(part.name, PartState()).process for part in plan.parts]
    running = [
        part.name
        for part, process in zip(plan.parts, found, strict=True)
        if process is not None and process.runs()
    ]
    # One that is being started again has a pid that is not in the file yet.
    if "kafka" not in running and plan.broker and local_kafka.status(Path(plan.broker.dir)):
        running.insert(0, "kafka")
    return running


def _start_supervisor(folder: Folder) -> None:
    # -P: the folder that we are in is not to be searched for modules.
    command = [sys.executable, "-P", "-m", "steplog.stack.supervisor", str(folder.path)]
    with folder.log("supervisor").open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def has_begun() -> bool:
        state = folder.state
        return child.poll() is not None or (state is not None and state.supervisor == child.pid)

    try:
        if not wait_for(has_begun, SUPERVISOR_LIMIT) or child.poll() is not None:
            raise Fatal(f"the supervisor did not start; see {folder.log('supervisor')}")
    except BaseException:
        child.terminate()
        child.wait()
        raise
    # It is not ours to wait for: Python would complain of a child that is still running.
    child.returncode = 0


def wait_until_ready(folder: Folder, told: Told, limit: float) -> None:
    """Tells of every change of a part, until all are ready or have done their work."""
    deadline, seen = time.monotonic() + limit, dict[str, tuple[str, int]]()
    while True:
        state = folder.state
        if state is None or not folder.is_supervised():
            raise Fatal(f"the supervisor is gone; see {folder.log('supervisor')}")
        tell_changes(state, seen, told)
        if state.is_settled():
            return
        if time.monotonic() > deadline:
            raise Fatal(f"after {limit:.0f} s {_unready(folder, state)}")
        time.sleep(LOOK_EVERY)


def tell_changes(state: State, seen: dict[str, tuple[str, int]], told: Told) -> None:
    for name, part in state.parts.items():
        now = (part.phase, part.restarts)
        if seen.get(name) != now:
            seen[name] = now
            told(name, part)


def _unready(folder: Folder, state: State) -> str:
    names = [name for name, part in state.parts.items() if part.phase not in ("ready", "ended")]
    logs = ", ".join(str(folder.log(name)) for name in names)
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not ready; see {logs}"


def down(directory: Path) -> list[str]:
    """Ends everything, with or without a living supervisor; gives the names of what ran."""
    folder = Folder(directory)
    if not folder.path.is_dir():
        return []
    with folder.turn():
        return _down(folder)


def _down(folder: Folder) -> list[str]:
    state, plan = folder.state, folder.plan
    if state is None or plan is None:
        return []
    running = remains(folder)
    if folder.is_supervised():
        supervisor = Process(state.supervisor, state.born)
        supervisor.signal(signal.SIGTERM)
        patience = KAFKA_LIMIT + sum(part.stop_s for part in plan.parts)
        if wait_for(lambda: not supervisor.runs(), patience):
            return running
        supervisor.signal(signal.SIGKILL)
        wait_for(lambda: not supervisor.runs(), SUPERVISOR_LIMIT)
    stop_parts(folder, plan, folder.state or state)
    folder.forget()
    return running
