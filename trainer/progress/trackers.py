"""Experiment trackers: wandb, TensorBoard and trackio, whichever a run chooses.

All get the same values by the same names, over the version. Each has a thread of its own and a
bounded queue, so that one which hangs or fails costs its own steps and nothing else: the ledger has
every step's Outcome anyhow. A restarted run goes on in the same place.

TensorBoard's files are written by tensorboardX: one small wheel, where torch.utils.tensorboard wants
the whole viewer with a web server in the trainer's environment. The viewer reads either.
"""

import importlib
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from servicekit.errors import Fatal
from trainer import metrics
from trainer.progress.report import Report

log = logging.getLogger(__name__)

TrackerName = Literal["wandb", "tensorboard", "trackio"]

PROJECT = "steplog"
WAITING = 1_000
"""Steps that wait for a slow tracker; later ones are left out."""
LAST_WORDS = 30.0
"""Seconds in which a tracker may finish when the trainer ends."""


class Place(NamedTuple):
    """What a tracker is told of the run, and where it keeps files."""

    run: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The run's name as an identifier: the same in every life, another for another name."""
        plain = re.sub(r"[^A-Za-z0-9_.-]", "-", self.run)[:48]
        if plain == self.run:
            return plain
        return f"{plain}-{blake2b(self.run.encode(), digest_size=4).hexdigest()}"


class Tracker(Protocol):
    def write(self, version: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """WANDB_MODE=offline needs no network; `wandb sync` sends the files later."""

    def __init__(self, place: Place, wandb: Any) -> None:
        place.folder.mkdir(parents=True, exist_ok=True)
        # The terminal is ours: wandb may neither write there nor ask for a login.
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        wandb.setup(settings)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=place.id,
            name=place.run,
            resume="allow",
            dir=str(place.folder),
            config=dict(place.config),
            reinit="create_new",
            settings=settings,
        )

    def write(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=version)

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    """Each life adds a file to the run's folder; what it writes again replaces what was there."""

    def __init__(self, place: Place, tensorboardx: Any) -> None:
        self._folder = place.folder / "tensorboard" / place.id
        self._make = tensorboardx.SummaryWriter
        self._writer: Any = None

    def write(self, version: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            # Names of files end with the second: two lives may begin in the same one.
            suffix = f".{os.getpid()}.{version}"
            self._writer = self._make(str(self._folder), purge_step=version, filename_suffix=suffix)
        for name, value in values.items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Trackio:
    """Keeps files in TRACKIO_DIR, as `trackio show` does, or sends to what TRACKIO_SERVER_URL or
    TRACKIO_SPACE_ID names."""

    def __init__(self, place: Place, trackio: Any) -> None:
        self._run = trackio.init(
            project=PROJECT,
            name=place.run,
            resume="allow",
            config=dict(place.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=version)

    def close(self) -> None:
        self._run.finish()


class Kind(NamedTuple):
    package: str
    """As it is installed and imported."""
    open: Callable[[Place, Any], Tracker]


KINDS: dict[str, Kind] = {
    "wandb": Kind("wandb", Wandb),
    "tensorboard": Kind("tensorboardX", TensorBoard),
    "trackio": Kind("trackio", Trackio),
}


def open_trackers(
    names: Sequence[str], run: str, folder: Path, config: Mapping[str, Any]
) -> list["TrackerThread"]:
    for name in names:
        if name not in KINDS:
            raise Fatal(f"there is no tracker {name}; there are {', '.join(KINDS)}")
        package = KINDS[name].package
        if find_spec(package) is None:
            raise Fatal(f"tracker {name} needs the package {package}: pip install {package}")
    place = Place(run, folder, config)
    return [TrackerThread(name, place) for name in names]


class TrackerThread:
    """One tracker, opened at the first step. Its failures are told once."""

    def __init__(self, name: str, place: Place) -> None:
        self._name = name
        self._place = place
        self._tracker: Tracker | None = None
        self._warned = False
        self._queue: queue.Queue[Report | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, report: Report) -> None:
        try:
            self._queue.put_nowait(report)
        except queue.Full:
            self._fail(f"it is {WAITING} steps behind")

    def close(self) -> None:
        try:
            self._queue.put(None, timeout=LAST_WORDS)
        except queue.Full:
            return  # it hangs, and was warned of
        self._thread.join(LAST_WORDS)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {LAST_WORDS:g} s")

    def _work(self) -> None:
        while (report := self._queue.get()) is not None:
            self._attempt(self._write, report)
        if self._tracker is not None:
            self._attempt(self._tracker.close)

    def _write(self, report: Report) -> None:
        if self._tracker is None:
            kind = KINDS[self._name]
            self._tracker = kind.open(self._place, importlib.import_module(kind.package))
        self._tracker.write(report.version, report.values())

    def _attempt(self, act: Callable[..., None], *given: Report) -> None:
        """Whatever a tracker raises, training goes on."""
        try:
            act(*given)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        metrics.tracker_failures.labels(self._name).inc()
        if not self._warned:
            self._warned = True
            log.warning("tracker %s misses steps, training goes on: %s", self._name, why)
