"""`steplog up`, `steplog down` and `steplog status`."""

import os
import time
from collections.abc import Callable

import msgspec

from servicekit.command_line import print_line
from servicekit.errors import Fatal
from steplog.stack import stack
from steplog.stack.planning import Planning
from steplog.stack.settings import StackSettings
from steplog.stack.state import RUNNING, Folder, PartState

COLUMNS = "{:<10} {:<9} {:>8} {:>8} {:>9}  {:<22} {}"

Say = Callable[[str], None]


def up(settings: StackSettings, say: Say = print_line) -> int:
    """Ctrl-C while it waits takes down what it has started."""
    plan = Planning(settings, os.environ).plan()
    folder = stack.up(settings.dir, plan)

    def told(name: str, part: PartState) -> None:
        again = f", restart {part.restarts}" if part.restarts else ""
        where = f"; see {folder.log(name)}" if part.phase == "failed" else ""
        say(f"{name:<10} {part.phase}{again}{where}")

    try:
        stack.wait_until_ready(folder, told, settings.wait_s)
        say(f"all is up; `steplog status --dir {settings.dir}` shows it")
        if settings.foreground:
            _stay(folder, told)
    except KeyboardInterrupt:
        say("taking it down")
        stack.down(settings.dir)
        raise
    return 0


def _stay(folder: Folder, told: stack.Told) -> None:
    seen: dict[str, tuple[str, int]] = {}
    if (state := folder.state) is not None:
        stack.tell_changes(state, seen, lambda name, part: None)
    while folder.is_supervised():
        if (state := folder.state) is not None:
            stack.tell_changes(state, seen, told)
        time.sleep(stack.LOOK_EVERY)
    if folder.state is not None:
        raise Fatal(
            f"the supervisor was killed; its processes go on: `steplog up --dir {folder.path}` "
            "looks after them again, `steplog down` ends them"
        )


def down(settings: StackSettings, say: Say = print_line) -> int:
    ended = stack.down(settings.dir)
    say(f"ended: {', '.join(reversed(ended))}" if ended else f"nothing runs in {settings.dir}")
    return 0


class Row(msgspec.Struct):
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


def status(settings: StackSettings, say: Say = print_line) -> int:
    """0 when everything is ready and looked after."""
    folder = Folder(settings.dir)
    is_supervised = folder.is_supervised()
    rows = _rows(folder)
    if settings.json_:
        told = {"dir": str(folder.path), "supervised": is_supervised, "parts": rows}
        say(msgspec.json.encode(told).decode())
    elif not rows:
        say(f"nothing runs in {settings.dir}")
    else:
        _show(rows, say)
        if not is_supervised:
            say(
                "nobody looks after them: the supervisor was killed; `steplog up` or `steplog down`"
            )
    return 0 if rows and is_supervised and all(row.ready for row in rows) else 1


def _rows(folder: Folder) -> list[Row]:
    state, plan = folder.state, folder.plan
    if state is None or plan is None:
        return []
    rows = []
    for part in plan.parts:
        found = state.parts.get(part.name, PartState())
        runs = found.process is not None and found.process.runs()
        is_gone = found.phase in RUNNING and not runs
        rows.append(
            Row(
                part=part.name,
                phase="gone" if is_gone else found.phase,
                ready=found.phase == "ended" or (found.phase == "ready" and runs),
                pid=found.pid if runs else None,
                since=found.since,
                restarts=found.restarts,
                exit_code=found.exit_code,
                trouble=found.trouble,
                url=part.url,
                log=str(folder.log(part.name)),
            )
        )
    return rows


def _show(rows: list[Row], say: Say) -> None:
    say(COLUMNS.format("part", "phase", "pid", "since", "restarts", "where", "last trouble"))
    for row in rows:
        since = _ago(time.time() - row.since) if row.since else "-"
        about = row.part, row.phase, row.pid or "-", since, row.restarts, row.url or ""
        say(COLUMNS.format(*about, row.trouble or "").rstrip())


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
