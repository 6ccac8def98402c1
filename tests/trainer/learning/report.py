"""The figures of all runs as a table, shown when they are over."""

import statistics

import pytest

from tests.trainer.learning.evidence import Evidence
from tests.trainer.learning.verdict import Verdict

HEADS = (
    *("run", "first", "last", "error", "errors", "versions", "steps", "steps/s"),
    *("age mean", "age max", "versions in a step", "|c-b| age 0", "verdicts"),
)


class Report:
    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = [HEADS]

    def add(self, name: str, verdict: Verdict, evidence: Evidence) -> None:
        steps = sum(len(made.steps) for made in evidence.trained)
        metrics = [made.outcome.metrics for made in evidence.trained]
        fresh = [m["logprob_difference_age_0"] for m in metrics if "logprob_difference_age_0" in m]
        became = " ".join(f"{word} {count}" for word, count in evidence.verdicts.items())
        self._rows.append(
            (
                name,
                f"{verdict.first:.3f}",
                f"{verdict.last:.3f}",
                f"{verdict.error:.4f}",
                f"{verdict.difference / verdict.error:+.1f}",
                f"{len(evidence.trained)}",
                f"{steps}",
                f"{steps / evidence.seconds:.1f}",
                f"{statistics.fmean(m['age_mean'] for m in metrics):.2f}",
                f"{max(m['age_max'] for m in metrics):.0f}",
                f"{max(len(step.segments) for made in evidence.trained for step in made.steps)}",
                f"{max(fresh):.1e}" if fresh else "-",
                became,
            )
        )

    def show(self, config: pytest.Config) -> None:
        """Past the capture of a test's output, which shows only what failed."""
        terminal = config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(terminal, pytest.TerminalReporter)
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        terminal.write_line("")
        for row in self._rows:
            cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            terminal.write_line("  ".join(cells))
