"""Where metrics go: always to metrics.jsonl, and to the trackers that were chosen.

A tracker is opened at its first row and written to by one thread, so that one which hangs costs
nothing but its own rows. What it raises is told once.
"""

import asyncio
import importlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from steplog.environment.errors import EnvironmentFailed

log = logging.getLogger(__name__)

PROJECT = "steplog"
LAST_WORDS_S = 30.0
Rows = Sequence[Mapping[str, Any]]


class Run(NamedTuple):
    name: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The same in every life of the folder, another in another folder."""
        place = str(self.folder.resolve()).encode()
        return f"{self.name}-{blake2b(place, digest_size=4).hexdigest()}"


class Tracker(Protocol):
    def write(self, step: int, values: Mapping[str, float], table: Rows) -> None: ...

    def close(self) -> None: ...


class Wandb:
    def __init__(self, run: Run, wandb: Any) -> None:
        self._wandb = wandb
        # The terminal is ours: wandb may neither write there nor ask for a login.
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        wandb.setup(settings)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=settings,
        )

    def write(self, step: int, values: Mapping[str, float], table: Rows) -> None:
        told: dict[str, Any] = dict(values)
        if table:
            columns = list(table[0])
            rows = [[row.get(column) for column in columns] for row in table]
            told["rollouts"] = self._wandb.Table(columns=columns, data=rows)
        self._run.log(told, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    def __init__(self, run: Run, tensorboardx: Any) -> None:
        self._writer = tensorboardx.SummaryWriter(str(run.folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float], table: Rows) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if table:
            text = "\n\n".join(json.dumps(row, default=str) for row in table)
            self._writer.add_text("rollouts", f"```\n{text}\n```", step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Trackio:
    def __init__(self, run: Run, trackio: Any) -> None:
        self._run = trackio.init(
            project=PROJECT,
            name=run.id,
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, step: int, values: Mapping[str, float], table: Rows) -> None:  # noqa: ARG002
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Kind(NamedTuple):
    package: str
    open: Callable[[Run, Any], Tracker]


KINDS: dict[str, Kind] = {
    "wandb": Kind("wandb", Wandb),
    "tensorboard": Kind("tensorboardX", TensorBoard),
    "trackio": Kind("trackio", Trackio),
}


class Trackers:
    def __init__(self, names: Sequence[str], run: Run) -> None:
        for name in names:
            package = KINDS[name].package
            if find_spec(package) is None:
                raise EnvironmentFailed(
                    f"tracker {name} needs the package {package}: pip install {package}"
                )
        run.folder.mkdir(parents=True, exist_ok=True)
        self._file = run.folder / "metrics.jsonl"
        self._threads = [TrackerThread(name, run) for name in names]

    def write(self, step: int, values: Mapping[str, float], table: Rows = ()) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"groups_done": step, **values}) + "\n")
        for thread in self._threads:
            thread.write(Row(step, dict(values), list(table)))

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(thread.close) for thread in self._threads))


class Row(NamedTuple):
    step: int
    values: Mapping[str, float]
    table: Rows


class TrackerThread:
    def __init__(self, name: str, run: Run) -> None:
        self._name = name
        self._run = run
        self._tracker: Tracker | None = None
        self._warned = False
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        # A daemon, since nothing ends a tracker that hangs but the end of the process.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        self._rows.put(row)

    def close(self) -> None:
        self._rows.put(None)
        self._thread.join(LAST_WORDS_S)
        if self._thread.is_alive():
            self._warn(f"it did not finish within {LAST_WORDS_S:g} s")

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            self._attempt(self._write, row)
        if self._tracker is not None:
            self._attempt(self._tracker.close)

    def _write(self, row: Row) -> None:
        if self._tracker is None:
            kind = KINDS[self._name]
            self._tracker = kind.open(self._run, importlib.import_module(kind.package))
        self._tracker.write(*row)

    def _attempt(self, act: Callable[..., None], *given: Row) -> None:
        """Whatever a tracker raises, rollouts go on."""
        try:
            act(*given)
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("tracker %s misses rows, rollouts go on: %s", self._name, why)
