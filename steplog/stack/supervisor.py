"""The process that keeps a stack running: starts parts, restarts what fails, ends all in order.

It holds no state that matters. Everything it knows of a process is in `state.json` before that process
runs, so when the supervisor is killed the parts go on, and the next one takes them over.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from servicekit.logs import TEXT
from servicekit.process import stop_on_signals
from steplog.kafka import local_kafka
from steplog.processes import Process, birth, spawn, wait_for
from steplog.stack.logs import rotate
from steplog.stack.plan import Part, Plan
from steplog.stack.silence import ANSWER_LIMIT, Silence, answer
from steplog.stack.state import RUNNING, Folder, PartState, Phase, State

log = logging.getLogger("supervisor")

LOOK_EVERY = 0.25
LOCK_LIMIT = 2.0
KILL_LIMIT = 10.0
ROTATE_EVERY = 5.0
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
        self._silence = Silence(plan.hang_s)
        self._rotated = 0.0
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
            self._rotate_logs()
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

    def _rotate_logs(self) -> None:
        """The broker's own is its own to rotate."""
        if time.monotonic() - self._rotated >= ROTATE_EVERY:
            self._rotated = time.monotonic()
            for name in ("supervisor", *(part.name for part in self._plan.parts)):
                rotate(self._folder.log(name))

    def _look_after(self, part: Part) -> None:
        state = self._state.parts[part.name]
        if part.kind == "kafka":
            self._look_after_kafka(part)
        elif state.phase in RUNNING and self._has_ended(part):
            self._note_end(part)
        elif state.phase in RUNNING and self._may_ask(part):
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

        self._silence.begin(part.name)
        process, child = spawn(part.command, self._folder.log(part.name), part.variables, remember)
        self._children[part.name] = child
        log.info("%s is pid %d", part.name, process.pid)

    def _has_ended(self, part: Part) -> bool:
        child = self._children.get(part.name)
        if child is not None:
            return child.poll() is not None
        process = self._state.parts[part.name].process
        return process is None or not process.runs()

    def _note_end(self, part: Part, trouble: str | None = None) -> None:
        """Without an exit code, of a process that is not our child, it counts as failed."""
        state, child = self._state.parts[part.name], self._children.pop(part.name, None)
        state.exit_code = child.poll() if child is not None else None
        if state.process is not None:
            state.process.end_the_rest()
        state.pid = None
        if state.exit_code == 0:
            log.info("%s has ended", part.name)
            self._were_ready.add(part.name)
            self._enter(part, "ended")
            return
        lived = time.time() - state.since
        self._fail(part, trouble or f"ended with {state.exit_code}", well=lived >= WELL_AFTER)

    def _fail(self, part: Part, trouble: str, well: bool = False) -> None:
        pause = 0.0 if well else self._pauses.get(part.name, 0.0) * 2
        self._pauses[part.name] = min(max(pause, FIRST_PAUSE), LONGEST_PAUSE)
        log.warning("%s %s; again in %g s", part.name, trouble, self._pauses[part.name])
        self._state.parts[part.name].trouble = trouble
        self._enter(part, "failed")

    def _ask(self, part: Part) -> None:
        """Whether it is ready. One that says it is not goes on: it may be busy, or wait for another.
        One that says nothing at all, and did before, hangs."""
        ready = 200 if part.ready is None else answer(part.ready)
        if ready is not None or part.health is None or answer(part.health) is not None:
            self._become(part, "ready" if ready == 200 else "starting")
        elif self._phase(part) != "starting" or self._silence.has_answered(part.name):
            self._miss(part)

    def _may_ask(self, part: Part) -> bool:
        is_starting = self._phase(part) == "starting"
        return part.kind != "once" and self._silence.is_time(part.name, is_starting)

    def _become(self, part: Part, phase: Phase) -> None:
        self._silence.hear(part.name)
        if phase == "ready":
            self._were_ready.add(part.name)
        self._enter_if_new(part, phase)

    def _miss(self, part: Part) -> None:
        self._enter_if_new(part, "silent")
        since = self._state.parts[part.name].since
        if self._silence.miss(part.name, since):
            self._end_hung(part, f"was silent for {time.time() - since:.0f} s")

    def _end_hung(self, part: Part, trouble: str) -> None:
        """Without asking first: it does not hear, and nothing that matters is in its memory alone."""
        process = self._state.parts[part.name].process
        if process is not None:
            process.signal(signal.SIGKILL)
            if not wait_for(lambda: not process.runs(), KILL_LIMIT):
                log.warning("%s %s, and cannot be killed", part.name, trouble)
                return
        if part.kind == "kafka":
            self._fail(part, trouble)
        else:
            self._note_end(part, trouble)

    def _look_after_kafka(self, part: Part) -> None:
        """The broker keeps its own file, and outlives us in its own way."""
        state, place = self._state.parts[part.name], self._plan.broker
        assert place is not None
        running = local_kafka.status(Path(place.dir))
        if running is not None and state.phase in ("ready", "silent"):
            if self._may_ask(part):
                self._ask_kafka(part, running)
            return
        if state.phase == "failed" and not self._may_start(part):
            return
        state.restarts += state.phase in ("ready", "silent", "failed")
        self._enter(part, "starting")
        try:
            running = local_kafka.start(Path(place.dir), place.port, place.heap)
        except local_kafka.LocalKafkaError as error:
            self._fail(part, f"did not start: {error}")
            return
        state.pid, state.born = running.pid, birth(running.pid) or ""
        self._were_ready.add(part.name)
        self._enter(part, "ready")

    def _ask_kafka(self, part: Part, running: local_kafka.Broker) -> None:
        if local_kafka.answers(running, ANSWER_LIMIT):
            self._become(part, "ready")
        else:
            self._miss(part)

    def _phase(self, part: Part) -> Phase:
        return self._state.parts[part.name].phase

    def _enter_if_new(self, part: Part, phase: Phase) -> None:
        if phase != self._phase(part):
            log.info("%s is %s", part.name, phase)
            self._enter(part, phase)

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


def main(directory: str) -> int:
    logging.basicConfig(level=logging.INFO, format=TEXT)
    folder = Folder(Path(directory))
    with folder.locked(LOCK_LIMIT) as ours:
        plan = folder.plan
        if not ours or plan is None:
            log.error("%s is supervised already, or has no plan", folder.path)
            return 1
        Supervisor(folder, plan, stop_on_signals()).run()
        folder.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
