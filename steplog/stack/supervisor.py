"""The process that keeps a stack running: starts parts, restarts what fails, ends all in order.

It holds no state that matters. Everything it knows of a process is in `state.json` before that process
runs, so when the supervisor is killed the parts go on, and the next one takes them over.
"""

import logging
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from pool.logs import TEXT
from pool.process import stopped_by_signals
from steplog import local_kafka
from steplog.stack.plan import Part, Plan
from steplog.stack.process import Process, birth, spawn
from steplog.stack.state import Folder, PartState, Phase, State

log = logging.getLogger("supervisor")

LOOK_EVERY = 0.25
LOCK_LIMIT = 2.0
READY_LIMIT = 2.0
"""Seconds that a part has to say that it is ready."""
READY_EVERY = 5.0
"""Seconds between two such questions to one that was."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Before a restart; each failure doubles it."""
WELL_AFTER = 60.0
"""A part that ran this long had started well: its next pause is the first again."""


class Supervisor:
    def __init__(self, folder: Folder, plan: Plan, stop: threading.Event) -> None:
        self._folder = folder
        self._plan = plan
        self._stop = stop
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pauses: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._were_ready: set[str] = set()
        before = folder.state
        known = before.parts if before is not None else {}
        self._state = State(
            supervisor=os.getpid(),
            born=birth(os.getpid()) or "",
            parts={part.name: known.get(part.name, PartState()) for part in plan.parts},
        )
        self._save()

    def run(self) -> None:
        self._take_over()
        # The broker last: starting it takes seconds, in which nothing else is looked after.
        parts = sorted(self._plan.parts, key=lambda part: part.kind == "kafka")
        while not self._stop.wait(LOOK_EVERY):
            for part in parts:
                if not self._stop.is_set():
                    self._look_after(part)
        stop_parts(self._folder, self._plan, self._state)

    def _take_over(self) -> None:
        """What an earlier supervisor left running goes on; the rest begins anew."""
        for part in self._plan.parts:
            state = self._state.parts[part.name]
            if state.process is not None and state.process.runs():
                log.info("%s runs already, as pid %s", part.name, state.pid)
            elif state.phase == "ended":
                self._were_ready.add(part.name)
            else:
                if state.process is not None:
                    state.process.end_the_rest()
                state.pid = None
                self._enter(part, "waiting")

    def _look_after(self, part: Part) -> None:
        state = self._state.parts[part.name]
        if part.kind == "kafka":
            self._look_after_kafka(part)
        elif state.phase in ("starting", "ready") and self._has_ended(part):
            self._note_end(part)
        elif state.phase in ("starting", "ready"):
            self._ask(part)
        elif state.phase in ("waiting", "failed") and self._may_start(part):
            self._start(part)

    def _may_start(self, part: Part) -> bool:
        state = self._state.parts[part.name]
        if state.phase == "failed" and time.time() - state.since < self._pauses[part.name]:
            return False
        # Once is enough: a service finds its own way when another is away for a while.
        return all(need in self._were_ready for need in part.needs)

    def _start(self, part: Part) -> None:
        state = self._state.parts[part.name]
        if state.phase == "failed":
            state.restarts += 1

        def remember(process: Process) -> None:
            state.pid, state.born = process.pid, process.born
            self._enter(part, "starting")

        process, child = spawn(part.command, self._folder.log(part.name), part.variables, remember)
        self._children[part.name] = child
        log.info("%s is pid %d", part.name, process.pid)

    def _has_ended(self, part: Part) -> bool:
        child = self._children.get(part.name)
        if child is not None:
            return child.poll() is not None
        process = self._state.parts[part.name].process
        return process is None or not process.runs()

    def _note_end(self, part: Part) -> None:
        """Without an exit code, of a process that is not our child, it counts as failed."""
        state, child = self._state.parts[part.name], self._children.pop(part.name, None)
        state.exit_code = child.returncode if child is not None else None
        if state.process is not None:
            state.process.end_the_rest()
        state.pid = None
        if state.exit_code == 0:
            log.info("%s has ended", part.name)
            self._were_ready.add(part.name)
            self._enter(part, "ended")
            return
        lived = time.time() - state.since
        pause = self._pauses.get(part.name, 0.0) * 2 if lived < WELL_AFTER else 0.0
        self._pauses[part.name] = min(max(pause, FIRST_PAUSE), LONGEST_PAUSE)
        log.warning(
            "%s ended with %s; again in %g s", part.name, state.exit_code, self._pauses[part.name]
        )
        self._enter(part, "failed")

    def _ask(self, part: Part) -> None:
        """Whether it is ready. One that no longer says so is not restarted: it may be busy."""
        state, now = self._state.parts[part.name], time.monotonic()
        if part.kind == "once":
            return
        if state.phase == "ready" and now - self._asked.get(part.name, 0.0) < READY_EVERY:
            return
        self._asked[part.name] = now
        is_ready = part.ready is None or answers(part.ready)
        if is_ready:
            self._were_ready.add(part.name)
        if is_ready != (state.phase == "ready"):
            log.info("%s is %s", part.name, "ready" if is_ready else "not ready any more")
            self._enter(part, "ready" if is_ready else "starting")

    def _look_after_kafka(self, part: Part) -> None:
        """The broker keeps its own file, and outlives us in its own way."""
        state, place = self._state.parts[part.name], self._plan.broker
        assert place is not None
        running = local_kafka.status(Path(place.dir))
        if running is not None and state.phase == "ready":
            self._were_ready.add(part.name)
            return
        if state.phase == "failed" and not self._may_start(part):
            return
        state.restarts += state.phase in ("ready", "failed")
        self._enter(part, "starting")
        try:
            running = local_kafka.start(Path(place.dir), place.port, place.heap)
        except local_kafka.LocalKafkaError as error:
            log.warning("%s: %s", part.name, error)
            before = self._pauses.get(part.name, 0.0)
            self._pauses[part.name] = min(max(before * 2, FIRST_PAUSE), LONGEST_PAUSE)
            self._enter(part, "failed")
            return
        state.pid, state.born = running.pid, birth(running.pid) or ""
        self._were_ready.add(part.name)
        self._enter(part, "ready")

    def _enter(self, part: Part, phase: Phase) -> None:
        state = self._state.parts[part.name]
        state.phase, state.since = phase, time.time()
        self._save()

    def _save(self) -> None:
        self._folder.state = self._state


def stop_parts(folder: Folder, plan: Plan, state: State) -> None:
    """From the last to the first: agents are told no before what serves them goes."""
    for part in reversed(plan.parts):
        found = state.parts.get(part.name, PartState())
        if part.kind == "kafka" and plan.broker is not None:
            log.info("ending %s", part.name)
            local_kafka.stop(Path(plan.broker.dir))
        elif found.process is not None:
            log.info("ending %s", part.name)
            found.process.end(part.stop_s)
        if found.phase != "ended":
            found.phase = "stopped"
        found.pid, found.since = None, time.time()
        folder.state = state


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=READY_LIMIT) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def main(directory: str) -> int:
    logging.basicConfig(level=logging.INFO, format=TEXT)
    folder = Folder(Path(directory))
    with folder.locked(LOCK_LIMIT) as ours:
        plan = folder.plan
        if not ours or plan is None:
            log.error("%s is supervised already, or has no plan", folder.path)
            return 1
        Supervisor(folder, plan, stopped_by_signals()).run()
        folder.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
