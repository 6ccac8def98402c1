"""Rates and CPU time of several ways to do the same work, the first of them the raw client."""

import time
from collections.abc import Callable
from typing import NamedTuple

ROUNDS = 3
"""Rounds in which all are measured in turn; the best one of each counts, as the machine is shared."""


class Measurement(NamedTuple):
    records: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.records / self.seconds

    @property
    def cpu_each(self) -> float:
        """Microseconds of CPU time per record, of all threads of the process."""
        return self.cpu / self.records * 1e6


def measure(work: Callable[[], int]) -> Measurement:
    started, cpu = time.perf_counter(), time.process_time()
    count = work()
    return Measurement(count, time.perf_counter() - started, time.process_time() - cpu)


def compare(*works: Callable[[], int]) -> list[Measurement]:
    """Measures functions, which return the number of records that they processed; returns the best
    round of each."""
    rounds = [[measure(work) for work in works] for _ in range(ROUNDS)]
    return [max(results, key=lambda result: result.rate) for results in zip(*rounds, strict=True)]


def show(title: str, rows: dict[str, Measurement], note: str) -> None:
    """Prints a table. The first row is the raw limit with which the others are compared."""
    raw = next(iter(rows.values()))
    print(f"\n{title}")
    print(f"  {'':<44} {'records/s':>10} {'µs CPU':>8} {'per core':>10} {'of raw':>7} {'CPU×':>6}")
    for name, row in rows.items():
        per_core = 1e6 / row.cpu_each
        print(
            f"  {name:<44} {row.rate:>10,.0f} {row.cpu_each:>8.1f} {per_core:>10,.0f} "
            f"{row.rate / raw.rate:>7.2f} {row.cpu_each / raw.cpu_each:>6.2f}"
        )
    print(f"  {note}")
