"""Rates and processor time, side by side with the raw client in the same run."""

import time
from collections.abc import Callable
from typing import NamedTuple

ROUNDS = 3
"""Each side runs so often, in turns, and its best round counts: the machine is shared."""


class Measured(NamedTuple):
    records: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.records / self.seconds

    @property
    def cpu_each(self) -> float:
        """Microseconds of processor time per record, all threads of the process."""
        return self.cpu / self.records * 1e6


def measure(work: Callable[[], int]) -> Measured:
    started, cpu = time.perf_counter(), time.process_time()
    count = work()
    return Measured(count, time.perf_counter() - started, time.process_time() - cpu)


def compare(*works: Callable[[], int]) -> list[Measured]:
    """Runs the works in turns and gives the best round of each."""
    rounds = [[measure(work) for work in works] for _ in range(ROUNDS)]
    return [max(results, key=lambda result: result.rate) for results in zip(*rounds, strict=True)]


def show(title: str, rows: dict[str, Measured], note: str) -> None:
    """The first row is the raw limit that the others are compared with."""
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
