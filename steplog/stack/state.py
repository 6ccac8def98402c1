"""A stack's folder: what runs in it, so that whoever comes later finds it.

DIRECTORY/
├── plan.json    the parts that were asked for
├── state.json   the supervisor and every process, with their births; replaced as a whole
├── lock         held by the supervisor as long as it lives, however it dies
└── logs/        one file per part, and the supervisor's own; older parts of each beside it
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from steplog.kafka.local_kafka import locked
from steplog.processes import Process, wait_for
from steplog.stack.plan import Plan

Phase = Literal["waiting", "starting", "ready", "silent", "failed", "ended", "stopped"]
"""`silent`: it has answered before, runs, and does not any more. `failed`: it comes back after a pause.
`ended`: it has done its work."""
RUNNING: tuple[Phase, ...] = ("starting", "ready", "silent")

Kept = TypeVar("Kept", bound=msgspec.Struct)


class PartState(msgspec.Struct, kw_only=True):
    phase: Phase = "waiting"
    pid: int | None = None
    born: str = ""
    since: float = 0.0
    """When it got into this phase, in seconds since 1970."""
    restarts: int = 0
    exit_code: int | None = None
    trouble: str | None = None
    """Why it was last started again, or will be."""

    @property
    def process(self) -> Process | None:
        return Process(self.pid, self.born) if self.pid is not None else None


class State(msgspec.Struct, kw_only=True):
    supervisor: int
    born: str
    parts: dict[str, PartState]

    def is_settled(self) -> bool:
        return all(part.phase in ("ready", "ended") for part in self.parts.values())


class Folder:
    def __init__(self, directory: Path) -> None:
        self.path = directory.resolve()
        self.logs = self.path / "logs"

    def make(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)

    def log(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    @property
    def plan(self) -> Plan | None:
        return _read(self.path / "plan.json", Plan)

    @plan.setter
    def plan(self, plan: Plan) -> None:
        _write(self.path / "plan.json", plan)

    @property
    def state(self) -> State | None:
        return _read(self.path / "state.json", State)

    @state.setter
    def state(self, state: State) -> None:
        _write(self.path / "state.json", state)

    def forget(self) -> None:
        for name in ("state.json", "plan.json"):
            (self.path / name).unlink(missing_ok=True)

    def is_supervised(self) -> bool:
        if not (self.path / "lock").exists():
            return False
        with self.locked() as ours:
            return not ours

    @contextmanager
    def locked(self, limit: float = 0.0) -> Iterator[bool]:
        """Whether the lock is ours now; a supervisor has it all its life. Others look at it for a
        moment, so whoever means to keep it waits a little."""
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield wait_for(lambda: _is_taken(handle), limit)
        finally:
            os.close(handle)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One command at a time brings a stack up or takes it down."""
        with locked(self.path):
            yield


def _is_taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: Path, kind: type[Kept]) -> Kept | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _write(file: Path, kept: msgspec.Struct) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    fresh.replace(file)
