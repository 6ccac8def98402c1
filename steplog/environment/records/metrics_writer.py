"""Writes an environment's metrics to metrics.jsonl, and to the trackers that were chosen."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from servicekit.errors import Fatal
from servicekit.trackers import Table, TrackedRun, Trackers
from steplog.environment.errors import EnvironmentFailed


class MetricsWriter:
    """Writes rows of metrics to metrics.jsonl in the folder, and to trackers."""

    def __init__(
        self, names: Sequence[str], title: str, folder: Path, config: Mapping[str, Any]
    ) -> None:
        # The same in every process that uses the folder, another in another folder.
        run_id = f"{title}-{blake2b(str(folder.resolve()).encode(), digest_size=4).hexdigest()}"
        try:
            self._trackers = Trackers(
                names, TrackedRun(title, run_id, folder, folder / "tensorboard", config)
            )
        except Fatal as error:
            raise EnvironmentFailed(str(error)) from None
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "metrics.jsonl"

    def write(self, step: int, values: Mapping[str, float], table: Table = ()) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"groups_done": step, **values}) + "\n")
        self._trackers.write(step, dict(values), list(table))

    async def close(self) -> None:
        await asyncio.to_thread(self._trackers.close)
