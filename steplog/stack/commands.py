"""`steplog up`, `steplog down` and `steplog status`."""

import os
import time
from collections.abc import Callable

import msgspec

from servicekit.command_line import print_line
from servicekit.errors import Fatal
from steplog.stack import stack
from steplog.stack.planner import StackPlanner
from steplog.stack.settings import StackSettings
from steplog.stack.state import RUNNING, PartState, StackFolder

COLUMNS = "{:<10} {:<9} {:>8} {:>8} {:>9}  {:<22} {}"

Print = Callable[[str], None]


def up(settings: StackSettings, say: Print = print_line) -> int:
    """Ctrl-C while it waits stops what it has started."""
    plan = StackPlanner(settings, os.environ).plan()
    folder = stack.up(settings.dir, plan)

    def report(name: str, part: PartState) -> None:
        restarts = f" (restart {part.restarts})" if part.restarts else ""
        log = f"; see {folder.log(name)}" if part.phase == "failed" else ""
        say(f"{name:<10} {part.phase}{restarts}{log}")

    try:
        stack.wait_until_ready(folder, report, settings.wait_s)
        say(f"The stack is up. `steplog status --dir {settings.dir}` shows its processes.")
        if settings.foreground:
            _stay(folder, report)
    except KeyboardInterrupt:
        say("Stopping the stack.")
        stack.down(settings.dir)
        raise
    return 0


def _stay(folder: StackFolder, report: stack.OnChange) -> None:
    """Report changes until the stack is stopped by another command."""
    reported: dict[str, tuple[str, int]] = {}
    if (state := folder.state) is not None:
        stack.report_changes(state, reported, lambda name, part: None)
    while folder.is_supervised():
        if (state := folder.state) is not None:
            stack.report_changes(state, reported, report)
        time.sleep(stack.LOOK_EVERY)
    if folder.state is not None:
        raise Fatal(
            "The supervisor was killed; the processes it started are still running. "
            f"`steplog up --dir {folder.path}` supervises them again, "
            f"`steplog down --dir {folder.path}` stops them."
        )


def down(settings: StackSettings, say: Print = print_line) -> int:
    stopped = stack.down(settings.dir)
    if stopped:
        say(f"Stopped {', '.join(reversed(stopped))}.")
    else:
        say(f"Nothing is running in {settings.dir}.")
    return 0


class PartRow(msgspec.Struct):
    """One row of `steplog status`, and one part of its JSON."""

    part: str
    phase: str
    ready: bool
    pid: int | None
    since: float
    restarts: int
    exit_code: int | None
    trouble: str | None
    url: str | None
    log: str


def status(settings: StackSettings, say: Print = print_line) -> int:
    """Exit status 0 if every part is ready and supervised, otherwise 1."""
    folder = StackFolder(settings.dir)
    is_supervised = folder.is_supervised()
    rows = _rows(folder)
    if settings.json_:
        document = {"dir": str(folder.path), "supervised": is_supervised, "parts": rows}
        say(msgspec.json.encode(document).decode())
    elif not rows:
        say(f"Nothing is running in {settings.dir}.")
    else:
        _print_table(rows, say)
        if not is_supervised:
            say(
                "The supervisor was killed, so failed parts are not restarted. `steplog up` "
                "supervises them again, `steplog down` stops them."
            )
    return 0 if rows and is_supervised and all(row.ready for row in rows) else 1


def _rows(folder: StackFolder) -> list[PartRow]:
    state, plan = folder.state, folder.plan
    if state is None or plan is None:
        return []
    rows = []
    for part in plan.parts:
        part_state = state.parts.get(part.name, PartState())
        is_running = part_state.process is not None and part_state.process.is_running()
        is_gone = part_state.phase in RUNNING and not is_running
        rows.append(
            PartRow(
                part=part.name,
                phase="gone" if is_gone else part_state.phase,
                ready=part_state.phase == "ended" or (part_state.phase == "ready" and is_running),
                pid=part_state.pid if is_running else None,
                since=part_state.since,
                restarts=part_state.restarts,
                exit_code=part_state.exit_code,
                trouble=part_state.trouble,
                url=part.url,
                log=str(folder.log(part.name)),
            )
        )
    return rows


def _print_table(rows: list[PartRow], say: Print) -> None:
    say(COLUMNS.format("part", "phase", "pid", "for", "restarts", "address", "last failure"))
    for row in rows:
        since = _format_age(time.time() - row.since) if row.since else "-"
        cells = row.part, row.phase, row.pid or "-", since, row.restarts, row.url or ""
        say(COLUMNS.format(*cells, row.trouble or "").rstrip())


def _format_age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
