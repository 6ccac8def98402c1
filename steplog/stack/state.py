"""The folder of a stack, which records what runs in it for later commands.

DIRECTORY/
├── plan.json    the plan that `steplog up` made
├── state.json   the supervisor and every process; replaced in one step
├── lock         held by the supervisor while it is alive; a kill releases it
└── logs/        one file per part and one of the supervisor, with their older files
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from steplog.kafka.local_kafka import locked
from steplog.processes import StartedProcess, wait_for
from steplog.stack.plan import StackPlan

Phase = Literal["waiting", "starting", "ready", "silent", "failed", "ended", "stopped"]
"""`silent`: it runs and answered before, but no longer does. `failed`: it will be restarted after a
pause. `ended`: it has finished its work."""
RUNNING: tuple[Phase, ...] = ("starting", "ready", "silent")

Stored = TypeVar("Stored", bound=msgspec.Struct)


class PartState(msgspec.Struct, kw_only=True):
    phase: Phase = "waiting"
    pid: int | None = None
    born: str = ""
    since: float = 0.0
    """When it entered this phase, as a Unix timestamp."""
    restarts: int = 0
    exit_code: int | None = None
    trouble: str | None = None
    """Why it was restarted last, or will be."""

    @property
    def process(self) -> StartedProcess | None:
        return StartedProcess(self.pid, self.born) if self.pid is not None else None


class StackState(msgspec.Struct, kw_only=True):
    supervisor: int
    born: str
    parts: dict[str, PartState]

    def is_settled(self) -> bool:
        """Whether every part is ready or has finished its work."""
        return all(part.phase in ("ready", "ended") for part in self.parts.values())


class StackFolder:
    def __init__(self, directory: Path) -> None:
        self.path = directory.resolve()
        self.logs = self.path / "logs"

    def make(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)

    def log(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    @property
    def plan(self) -> StackPlan | None:
        return _read(self.path / "plan.json", StackPlan)

    @plan.setter
    def plan(self, plan: StackPlan) -> None:
        _write(self.path / "plan.json", plan)

    @property
    def state(self) -> StackState | None:
        return _read(self.path / "state.json", StackState)

    @state.setter
    def state(self, state: StackState) -> None:
        _write(self.path / "state.json", state)

    def forget(self) -> None:
        """The stack is stopped: remove its plan and its state."""
        for name in ("state.json", "plan.json"):
            (self.path / name).unlink(missing_ok=True)

    def is_supervised(self) -> bool:
        if not (self.path / "lock").exists():
            return False
        with self.locked() as is_ours:
            return not is_ours

    @contextmanager
    def locked(self, limit: float = 0.0) -> Iterator[bool]:
        """Yields whether we got the lock. A supervisor holds it as long as it lives; other commands
        take it for a moment to look, so a supervisor waits a little for it."""
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield wait_for(lambda: _take_lock(handle), limit)
        finally:
            os.close(handle)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Only one command at a time starts or stops a stack."""
        with locked(self.path):
            yield


def _take_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: Path, kind: type[Stored]) -> Stored | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _write(file: Path, document: msgspec.Struct) -> None:
    new_file = file.with_suffix(".new")
    new_file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    new_file.replace(file)
