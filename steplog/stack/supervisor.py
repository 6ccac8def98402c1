"""The process that keeps a stack running: it starts, restarts and stops the parts.

It holds no state of its own that matters. Every process is recorded in `state.json` before it runs, so
when the supervisor is killed the parts keep running, and the next supervisor takes them over.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from servicekit.logs import TEXT_FORMAT
from servicekit.process import stop_on_signals
from steplog.kafka import local_kafka
from steplog.processes import StartedProcess, spawn, start_time, wait_for
from steplog.stack.health_checks import ANSWER_LIMIT, HealthChecks, get_status
from steplog.stack.logs import rotate
from steplog.stack.plan import StackPart, StackPlan
from steplog.stack.state import RUNNING, PartState, Phase, StackFolder, StackState

log = logging.getLogger("supervisor")

LOOK_EVERY = 0.25
LOCK_LIMIT = 2.0
KILL_LIMIT = 10.0
ROTATE_EVERY = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a restart; each failure doubles the pause."""
STABLE_AFTER = 60.0
"""Seconds. If a part ran this long before it failed, the pause starts at the shortest again."""


class Supervisor:
    """Handles every part of the plan, a few times per second."""

    def __init__(self, folder: StackFolder, plan: StackPlan, stop: threading.Event) -> None:
        self._folder = folder
        self._plan = plan
        self._stop = stop
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pauses: dict[str, float] = {}
        self._health = HealthChecks(plan.hang_s)
        self._rotated_at = 0.0
        self._were_ready: set[str] = set()
        earlier = folder.state
        earlier_parts = earlier.parts if earlier is not None else {}
        self._state = StackState(
            supervisor=os.getpid(),
            born=start_time(os.getpid()) or "",
            parts={part.name: earlier_parts.get(part.name, PartState()) for part in plan.parts},
        )
        self._save()

    def run(self) -> None:
        self._take_over()
        # The broker comes last: starting it takes seconds, in which no other part is handled.
        parts = sorted(self._plan.parts, key=lambda part: part.kind == "kafka")
        while not self._stop.wait(LOOK_EVERY):
            self._rotate_logs()
            for part in parts:
                if not self._stop.is_set():
                    self._update(part)
        stop_parts(self._folder, self._plan, self._state)

    def _take_over(self) -> None:
        """Keep the processes that an earlier supervisor left running; everything else starts anew."""
        for part in self._plan.parts:
            state = self._state.parts[part.name]
            if state.process is not None and state.process.is_running():
                log.info("%s is already running as pid %s", part.name, state.pid)
            elif state.phase == "ended":
                self._were_ready.add(part.name)
            else:
                if state.process is not None:
                    state.process.kill_session()
                state.pid = None
                self._enter(part, "waiting")

    def _rotate_logs(self) -> None:
        """The broker rotates its own log."""
        if time.monotonic() - self._rotated_at >= ROTATE_EVERY:
            self._rotated_at = time.monotonic()
            for name in ("supervisor", *(part.name for part in self._plan.parts)):
                rotate(self._folder.log(name))

    def _update(self, part: StackPart) -> None:
        state = self._state.parts[part.name]
        if part.kind == "kafka":
            self._update_kafka(part)
        elif state.phase in RUNNING and self._has_ended(part):
            self._record_end(part)
        elif state.phase in RUNNING and self._is_check_due(part):
            self._check(part)
        elif state.phase in ("waiting", "failed") and self._may_start(part):
            self._start(part)

    def _may_start(self, part: StackPart) -> bool:
        state = self._state.parts[part.name]
        if state.phase == "failed" and time.time() - state.since < self._pauses[part.name]:
            return False
        # It is enough that they were ready once: services cope with others that are down for a while.
        return all(need in self._were_ready for need in part.needs)

    def _start(self, part: StackPart) -> None:
        state = self._state.parts[part.name]
        if state.phase == "failed":
            state.restarts += 1

        def record(process: StartedProcess) -> None:
            state.pid, state.born = process.pid, process.born
            self._enter(part, "starting")

        self._health.reset(part.name)
        process, child = spawn(part.command, self._folder.log(part.name), part.variables, record)
        self._children[part.name] = child
        log.info("%s started as pid %d", part.name, process.pid)

    def _has_ended(self, part: StackPart) -> bool:
        child = self._children.get(part.name)
        if child is not None:
            return child.poll() is not None
        process = self._state.parts[part.name].process
        return process is None or not process.is_running()

    def _record_end(self, part: StackPart, trouble: str | None = None) -> None:
        """A process that is not our child has no exit code for us; it counts as failed."""
        state, child = self._state.parts[part.name], self._children.pop(part.name, None)
        state.exit_code = child.poll() if child is not None else None
        if state.process is not None:
            state.process.kill_session()
        state.pid = None
        if state.exit_code == 0:
            log.info("%s has finished", part.name)
            self._were_ready.add(part.name)
            self._enter(part, "ended")
            return
        was_stable = time.time() - state.since >= STABLE_AFTER
        self._fail(part, trouble or _describe_exit(state.exit_code), was_stable)

    def _fail(self, part: StackPart, trouble: str, was_stable: bool = False) -> None:
        pause = 0.0 if was_stable else self._pauses.get(part.name, 0.0) * 2
        self._pauses[part.name] = min(max(pause, FIRST_PAUSE), LONGEST_PAUSE)
        log.warning("%s %s; restarting in %g s", part.name, trouble, self._pauses[part.name])
        self._state.parts[part.name].trouble = trouble
        self._enter(part, "failed")

    def _check(self, part: StackPart) -> None:
        """Check whether it is ready. A part that answers "not ready" is left alone: it may be busy or
        waiting for another. A part that answered before and no longer does is hanging."""
        ready = 200 if part.ready is None else get_status(part.ready)
        if ready is not None or part.health is None or get_status(part.health) is not None:
            self._record_answer(part, "ready" if ready == 200 else "starting")
        elif self._phase(part) != "starting" or self._health.has_answered(part.name):
            self._record_silence(part)

    def _is_check_due(self, part: StackPart) -> bool:
        is_starting = self._phase(part) == "starting"
        return part.kind != "once" and self._health.is_due(part.name, is_starting)

    def _record_answer(self, part: StackPart, phase: Phase) -> None:
        self._health.record_answer(part.name)
        if phase == "ready":
            self._were_ready.add(part.name)
        self._enter_if_new(part, phase)

    def _record_silence(self, part: StackPart) -> None:
        self._enter_if_new(part, "silent")
        since = self._state.parts[part.name].since
        if self._health.record_failure(part.name, since):
            self._kill_hung(part, f"did not answer for {time.time() - since:.0f} s")

    def _kill_hung(self, part: StackPart, trouble: str) -> None:
        """Without SIGTERM, which it would not handle. Nothing that matters is only in its memory."""
        process = self._state.parts[part.name].process
        if process is not None:
            process.signal(signal.SIGKILL)
            if not wait_for(lambda: not process.is_running(), KILL_LIMIT):
                log.warning("%s %s and cannot be killed", part.name, trouble)
                return
        if part.kind == "kafka":
            self._fail(part, trouble)
        else:
            self._record_end(part, trouble)

    def _update_kafka(self, part: StackPart) -> None:
        """The broker has its own process management (`local_kafka`), and outlives the supervisor
        too."""
        state, broker = self._state.parts[part.name], self._plan.broker
        assert broker is not None
        running = local_kafka.status(Path(broker.dir))
        if running is not None and state.phase in ("ready", "silent"):
            if self._is_check_due(part):
                self._check_kafka(part, running)
            return
        if state.phase == "failed" and not self._may_start(part):
            return
        state.restarts += state.phase in ("ready", "silent", "failed")
        self._enter(part, "starting")
        try:
            running = local_kafka.start(Path(broker.dir), broker.port, broker.heap)
        except local_kafka.LocalKafkaError as error:
            self._fail(part, f"did not start: {error}")
            return
        state.pid, state.born = running.pid, start_time(running.pid) or ""
        self._were_ready.add(part.name)
        self._enter(part, "ready")

    def _check_kafka(self, part: StackPart, running: local_kafka.Broker) -> None:
        if local_kafka.answers(running, ANSWER_LIMIT):
            self._record_answer(part, "ready")
        else:
            self._record_silence(part)

    def _phase(self, part: StackPart) -> Phase:
        return self._state.parts[part.name].phase

    def _enter_if_new(self, part: StackPart, phase: Phase) -> None:
        if phase != self._phase(part):
            log.info("%s is %s", part.name, phase)
            self._enter(part, phase)

    def _enter(self, part: StackPart, phase: Phase) -> None:
        state = self._state.parts[part.name]
        state.phase, state.since = phase, time.time()
        self._save()

    def _save(self) -> None:
        self._folder.state = self._state


def _describe_exit(exit_code: int | None) -> str:
    return "ended" if exit_code is None else f"exited with status {exit_code}"


def stop_parts(folder: StackFolder, plan: StackPlan, state: StackState) -> None:
    """From the last to the first: the gateway refuses new calls before the engines stop."""
    for part in reversed(plan.parts):
        part_state = state.parts.get(part.name, PartState())
        if part.kind == "kafka" and plan.broker is not None:
            log.info("stopping %s", part.name)
            local_kafka.stop(Path(plan.broker.dir))
        elif part_state.process is not None:
            log.info("stopping %s", part.name)
            part_state.process.end(part.stop_s)
        if part_state.phase != "ended":
            part_state.phase = "stopped"
        part_state.pid, part_state.since = None, time.time()
        folder.state = state


def main(directory: str) -> int:
    logging.basicConfig(level=logging.INFO, format=TEXT_FORMAT)
    folder = StackFolder(Path(directory))
    with folder.locked(LOCK_LIMIT) as is_ours:
        plan = folder.plan
        if not is_ours or plan is None:
            log.error("%s already has a supervisor, or has no plan", folder.path)
            return 1
        Supervisor(folder, plan, stop_on_signals()).run()
        folder.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
