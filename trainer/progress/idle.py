"""Idle time of the trainer: everything that is not training, by cause."""

from collections.abc import Mapping

CAUSES = {
    "waiting": "waiting",
    "reading": "reading",
    "opening": "syncing",
    "syncing": "syncing",
    "checkpointing": "checkpointing",
}
"""The cause that a phase counts for. All other time, such as a recovery, is `other`."""


def idle_metrics(timings: Mapping[str, float]) -> dict[str, float]:
    """The idle share of a step's time, and the share of each cause; the causes sum to the whole."""
    total = sum(timings.values())
    if not total:
        return {}
    seconds = dict.fromkeys([*CAUSES.values(), "other"], 0.0)
    for phase, spent in timings.items():
        if phase != "training":
            seconds[CAUSES.get(phase, "other")] += spent
    shares = {f"idle_{cause}_fraction": spent / total for cause, spent in seconds.items()}
    return {"idle_fraction": sum(shares.values()), **shares}
