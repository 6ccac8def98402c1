"""The trainer's experiment trackers: every step under its version, missed steps as a metric.

The ledger has every step's Outcome anyhow. A restarted trainer continues the same tracked run.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from servicekit.trackers import TrackedRun, Trackers
from trainer import metrics


def open_trackers(
    names: Sequence[str], run: str, folder: Path, config: Mapping[str, Any]
) -> Trackers:
    """Raises Fatal when a tracker does not exist or its package is not installed."""
    run_id = tracked_id(run)
    tracked = TrackedRun(run, run_id, folder, folder / "tensorboard" / run_id, config)
    return Trackers(names, tracked, lambda name: metrics.tracker_failures.labels(name).inc())


def tracked_id(run: str) -> str:
    """The run's name as an identifier: always the same for a name, and distinct for distinct names."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", run)[:48]
    if plain == run:
        return plain
    return f"{plain}-{blake2b(run.encode(), digest_size=4).hexdigest()}"
