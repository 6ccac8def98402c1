"""Experiment trackers: wandb, TensorBoard and trackio, for the trainer and for environments.

All trackers get the same rows. Each has a thread and a bounded queue of its own and is opened at its
first row, so a tracker that hangs or fails costs its own rows and nothing else. Its first failure is
logged at once, and the number of rows that it missed when it is closed.

TensorBoard's files are written by tensorboardX: one small wheel, whereas torch.utils.tensorboard
needs the whole viewer with its web server. The viewer reads the files of either.
"""

import importlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from servicekit.errors import Fatal

log = logging.getLogger(__name__)

TrackerName = Literal["wandb", "tensorboard", "trackio"]

PROJECT = "steplog"
QUEUE_LIMIT = 1_000
"""Rows that wait for a slow tracker; further rows are dropped."""
CLOSE_TIMEOUT_S = 30.0
"""Seconds that all trackers together get to write their last rows."""

Table = Sequence[Mapping[str, Any]]


class TrackedRun(NamedTuple):
    """What trackers learn about a run. A restart that uses the same ids and folders continues it."""

    name: str
    id: str
    folder: Path
    """wandb keeps its files here."""
    tensorboard_folder: Path
    config: Mapping[str, Any]


class TrackerRow(NamedTuple):
    step: int
    values: Mapping[str, float]
    table: Table = ()
    """Sample rollouts, for trackers that can show text."""


class Tracker(Protocol):
    def write(self, row: TrackerRow) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """With WANDB_MODE=offline it needs no network; `wandb sync` uploads the files later."""

    def __init__(self, run: TrackedRun, wandb: Any) -> None:
        self._wandb = wandb
        run.folder.mkdir(parents=True, exist_ok=True)
        # The terminal is ours: wandb must neither write to it nor ask for a login.
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        wandb.setup(settings)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            reinit="create_new",
            settings=settings,
        )

    def write(self, row: TrackerRow) -> None:
        values: dict[str, Any] = dict(row.values)
        if row.table:
            columns = list(row.table[0])
            cells = [[line.get(column) for column in columns] for line in row.table]
            values["rollouts"] = self._wandb.Table(columns=columns, data=cells)
        self._run.log(values, step=row.step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Each process adds a file to the run's folder; a step that is written again replaces the old."""

    def __init__(self, run: TrackedRun, tensorboardx: Any) -> None:
        self._folder = run.tensorboard_folder
        self._tensorboardx = tensorboardx
        self._writer: Any = None

    def write(self, row: TrackerRow) -> None:
        if self._writer is None:
            # File names end with the second, and two processes may start within the same one.
            suffix = f".{os.getpid()}.{row.step}"
            self._writer = self._tensorboardx.SummaryWriter(
                str(self._folder), purge_step=row.step, filename_suffix=suffix
            )
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step)
        if row.table:
            text = "\n\n".join(json.dumps(line, default=str) for line in row.table)
            self._writer.add_text("rollouts", f"```\n{text}\n```", row.step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class TrackioTracker:
    """Keeps its files in TRACKIO_DIR, where `trackio show` looks, or sends the values to the server
    named by TRACKIO_SERVER_URL or TRACKIO_SPACE_ID."""

    def __init__(self, run: TrackedRun, trackio: Any) -> None:
        self._run = trackio.init(
            project=PROJECT,
            name=run.id,
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, row: TrackerRow) -> None:
        self._run.log(dict(row.values), step=row.step)

    def close(self) -> None:
        self._run.finish()


class TrackerKind(NamedTuple):
    package: str
    """The name under which it is installed and imported."""
    open: Callable[[TrackedRun, Any], Tracker]


KINDS: dict[str, TrackerKind] = {
    "wandb": TrackerKind("wandb", WandbTracker),
    "tensorboard": TrackerKind("tensorboardX", TensorBoardTracker),
    "trackio": TrackerKind("trackio", TrackioTracker),
}


class Trackers:
    """The trackers that a run has chosen."""

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        on_missed_row: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_missed_row` is called with the tracker's name for each row that it missed. Raises Fatal
        when a tracker does not exist or its package is not installed."""
        for name in names:
            _check_installed(name)
        self._threads = [TrackerThread(name, run, on_missed_row) for name in names]

    def write(self, step: int, values: Mapping[str, float], table: Table = ()) -> None:
        """Queues a row for every tracker and returns at once."""
        for thread in self._threads:
            thread.write(TrackerRow(step, values, table))

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(deadline)


def _check_installed(name: str) -> None:
    if name not in KINDS:
        raise Fatal(f"There is no tracker {name}; choose from {', '.join(KINDS)}.")
    package = KINDS[name].package
    if find_spec(package) is None:
        raise Fatal(f"Tracker {name} needs the package {package}: pip install {package}")


class TrackerThread:
    """One tracker and the thread that writes to it."""

    def __init__(self, name: str, run: TrackedRun, on_missed_row: Callable[[str], None]) -> None:
        self._name = name
        self._run = run
        self._on_missed_row = on_missed_row
        self._tracker: Tracker | None = None
        self._missed_rows = 0
        self._rows: queue.SimpleQueue[TrackerRow | None] = queue.SimpleQueue()
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, row: TrackerRow) -> None:
        if self._rows.qsize() >= QUEUE_LIMIT:
            self._miss_row(f"it is {QUEUE_LIMIT:,} rows behind")
        else:
            self._rows.put(row)

    def end(self) -> None:
        """Lets the thread finish once the queue is empty."""
        self._rows.put(None)

    def join(self, deadline: float) -> None:
        """Waits for the thread until the deadline on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("Tracker %s did not finish within %g s.", self._name, CLOSE_TIMEOUT_S)
        if self._missed_rows > 1:
            log.warning("Tracker %s missed %d rows in all.", self._name, self._missed_rows)

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                self._write(row)
            except Exception as error:  # whatever a tracker raises, the run continues
                self._miss_row(f"{type(error).__name__}: {error}")
        self._close()

    def _write(self, row: TrackerRow) -> None:
        if self._tracker is None:
            kind = KINDS[self._name]
            self._tracker = kind.open(self._run, importlib.import_module(kind.package))
        self._tracker.write(row)

    def _close(self) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker.close()
        except Exception as error:  # as above
            log.warning(
                "Tracker %s failed to close: %s: %s", self._name, type(error).__name__, error
            )

    def _miss_row(self, reason: str) -> None:
        self._on_missed_row(self._name)
        self._missed_rows += 1
        if self._missed_rows == 1:
            log.warning(
                "Tracker %s missed a row, the run continues without it: %s", self._name, reason
            )
