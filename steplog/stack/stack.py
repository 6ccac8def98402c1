"""Starts, watches and stops a stack, from the outside: the supervisor is another process."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from servicekit.errors import Fatal
from steplog.kafka import local_kafka
from steplog.processes import StartedProcess, wait_for
from steplog.stack.plan import StackPlan
from steplog.stack.state import PartState, StackFolder, StackState
from steplog.stack.supervisor import stop_parts

SUPERVISOR_LIMIT = 60.0
"""Seconds in which a supervisor must write its first state; on a busy machine imports take long."""
LOOK_EVERY = 0.2
KAFKA_LIMIT = 90.0
"""Seconds for which a supervisor that is starting the broker may not react to signals."""

OnChange = Callable[[str, PartState], None]


def up(directory: Path, plan: StackPlan) -> StackFolder:
    """Start a supervisor, unless one is running this plan already. It takes over the processes that a
    killed supervisor left behind, and keeps running when this process ends."""
    folder = StackFolder(directory)
    folder.make()
    with folder.exclusive():
        _up(folder, plan)
    return folder


def _up(folder: StackFolder, plan: StackPlan) -> None:
    before, is_supervised = folder.plan, folder.is_supervised()
    if before is not None and before != plan and (is_supervised or running_parts(folder)):
        raise Fatal(
            f"The stack in {folder.path} is running with other settings. Stop it first with "
            f"`steplog down --dir {folder.path}`."
        )
    if not is_supervised:
        folder.plan = plan
        _start_supervisor(folder)


def running_parts(folder: StackFolder) -> list[str]:
    """The names of the parts whose process is running, supervised or not."""
    state, plan = folder.state, folder.plan
    if state is None or plan is None:
        return []
    processes = [state.parts.get(part.name, PartState()).process for part in plan.parts]
    running = [
        part.name
        for part, process in zip(plan.parts, processes, strict=True)
        if process is not None and process.is_running()
    ]
    # The pid of a broker that is being restarted is not recorded yet.
    if "kafka" not in running and plan.broker and local_kafka.status(Path(plan.broker.dir)):
        running.insert(0, "kafka")
    return running


def _start_supervisor(folder: StackFolder) -> None:
    # -P: the current folder is not searched for modules.
    command = [sys.executable, "-P", "-m", "steplog.stack.supervisor", str(folder.path)]
    with folder.log("supervisor").open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def has_started() -> bool:
        state = folder.state
        return child.poll() is not None or (state is not None and state.supervisor == child.pid)

    try:
        if not wait_for(has_started, SUPERVISOR_LIMIT) or child.poll() is not None:
            raise Fatal(f"The supervisor did not start; see {folder.log('supervisor')}.")
    except BaseException:
        child.terminate()
        child.wait()
        raise
    # It keeps running after us; without this, Python would warn about a child that still runs.
    child.returncode = 0


def wait_until_ready(folder: StackFolder, on_change: OnChange, limit: float) -> None:
    """Report every change of a part until all are ready or have finished their work."""
    deadline, reported = time.monotonic() + limit, dict[str, tuple[str, int]]()
    while True:
        state = folder.state
        if state is None or not folder.is_supervised():
            raise Fatal(f"The supervisor has ended; see {folder.log('supervisor')}.")
        report_changes(state, reported, on_change)
        if state.is_settled():
            return
        if time.monotonic() > deadline:
            raise Fatal(f"After {limit:.0f} s {_describe_unready(folder, state)}.")
        time.sleep(LOOK_EVERY)


def report_changes(
    state: StackState, reported: dict[str, tuple[str, int]], on_change: OnChange
) -> None:
    """Call `on_change` for every part that differs from what was reported before."""
    for name, part in state.parts.items():
        current = (part.phase, part.restarts)
        if reported.get(name) != current:
            reported[name] = current
            on_change(name, part)


def _describe_unready(folder: StackFolder, state: StackState) -> str:
    names = [name for name, part in state.parts.items() if part.phase not in ("ready", "ended")]
    logs = ", ".join(str(folder.log(name)) for name in names)
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not ready; see {logs}"


def down(directory: Path) -> list[str]:
    """Stop everything, with or without a supervisor; returns the names of the parts that were
    running."""
    folder = StackFolder(directory)
    if not folder.path.is_dir():
        return []
    with folder.exclusive():
        return _down(folder)


def _down(folder: StackFolder) -> list[str]:
    state, plan = folder.state, folder.plan
    if state is None or plan is None:
        return []
    running = running_parts(folder)
    if folder.is_supervised():
        supervisor = StartedProcess(state.supervisor, state.born)
        supervisor.signal(signal.SIGTERM)
        patience = KAFKA_LIMIT + sum(part.stop_s for part in plan.parts)
        if wait_for(lambda: not supervisor.is_running(), patience):
            return running
        supervisor.signal(signal.SIGKILL)
        wait_for(lambda: not supervisor.is_running(), SUPERVISOR_LIMIT)
    stop_parts(folder, plan, folder.state or state)
    folder.forget()
    return running
