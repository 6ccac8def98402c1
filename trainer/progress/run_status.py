"""The present state of a training run, independent of how it is shown.

The loop's time is counted for its innermost phase, so the time split adds up to the elapsed time,
however phases are nested.
"""

import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pool.core.marks import Age

Phase = Literal[
    "recovering", "waiting", "reading", "training", "opening", "syncing", "checkpointing"
]

OTHER = "other"
"""The phase of time outside of all phases."""
UNKNOWN = -1.0
"""Mean age of a batch in which all tokens are of other runs."""
STEPS_SHOWN = 120
STEPS_SPLIT = 20
"""Steps that the time split covers: enough to be steady, few enough to show a change."""
ALARMS_SHOWN = 3
ALARM_NAME = re.compile(r"([a-z][a-z0-9_ ]{0,30}): ")


@dataclass(frozen=True, slots=True)
class StepReport:
    """The values of one step; their names are the same in the ledger, Prometheus and every tracker."""

    version: int
    sequence: int
    incarnation: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase since the step before."""
    verdicts: Mapping[str, int] = field(default_factory=dict)
    """Trajectories by verdict since the start of the run."""
    alarms: Sequence[str] = ()
    """Sentences; the text before the first colon is the name of the alarm."""
    ages: Sequence[Age] = ()
    """Ages of the trained trajectories."""

    def values(self) -> dict[str, float]:
        """All values as one flat mapping, for trackers."""
        return {
            **self.metrics,
            **{f"seconds/{phase}": seconds for phase, seconds in self.timings.items()},
            **{f"trajectories/{verdict}": count for verdict, count in self.verdicts.items()},
            "alarms": len(self.alarms),
            "incarnation": self.incarnation,
        }


@dataclass(slots=True)
class RaisedAlarm:
    """An alarm, as it was last raised."""

    name: str
    sentence: str
    version: int | None
    times: int = 1


def alarm_name(sentence: str) -> str:
    """The name of the alarm, which a metric can have as a label; sentences contain numbers."""
    match = ALARM_NAME.match(sentence)
    return match[1] if match else "other"


@dataclass(frozen=True, slots=True)
class RangeProgress:
    """How many offsets of a range are read, and the estimated time for the rest."""

    done: int
    total: int
    seconds_left: float | None = None

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0


class RunStatus:
    """Everything that a view can show. Hold `lock` to read or write it: the loop writes, and a
    view reads from a thread of its own."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self.run = run
        self.incarnation: int | None = None
        self.version: int | None = None
        self.ready = 0
        """Groups that could be trained now."""
        self.target = 0
        """Groups in a batch."""
        self.lag: int | None = None
        self.range: RangeProgress | None = None
        """None for a live run."""
        self.recovered = 0
        self.to_recover = 0
        self.engines_ok: Sequence[str] = ()
        self.engines_failed: Sequence[str] = ()
        self.last: StepReport | None = None
        self.rewards: deque[float] = deque(maxlen=STEPS_SHOWN)
        self.alarms: deque[RaisedAlarm] = deque(maxlen=ALARMS_SHOWN)
        self.clock = clock
        self._reading: tuple[int, float] | None = None
        """Where and when this incarnation started to read."""
        self._phases: list[str] = [OTHER]
        self._splits: deque[defaultdict[str, float]] = deque(maxlen=STEPS_SPLIT)
        self._split: defaultdict[str, float] = defaultdict(float)
        self.started = self.changed = self._counted = clock()

    @property
    def phase(self) -> str:
        """The phase to show. During recovery it is `recovering`, whatever inner phase is active."""
        if "recovering" in self._phases:
            return "recovering"
        if self._phases == [OTHER]:
            return "starting" if self.version is None else "between phases"
        return self._phases[-1]

    @property
    def phase_seconds(self) -> float:
        return self.clock() - self.changed

    @property
    def seconds(self) -> float:
        return self.clock() - self.started

    def enter(self, phase: Phase) -> tuple[str, float]:
        """Starts a phase; returns the one that was active, with its seconds since the last count."""
        counted, previous = self.count(), self.phase
        self._phases.append(phase)
        self._note_change(previous)
        return counted

    def leave(self) -> tuple[str, float]:
        counted, previous = self.count(), self.phase
        self._phases.pop()
        self._note_change(previous)
        return counted

    def _note_change(self, previous: str) -> None:
        if self.phase != previous:
            self.changed = self._counted

    def count(self) -> tuple[str, float]:
        """Adds the time since the last count to the active phase; returns both."""
        now, before, phase = self.clock(), self._counted, self._phases[-1]
        self._counted = now
        if now > before:
            self._split[phase] += now - before
        return phase, now - before

    def timings(self) -> dict[str, float]:
        """Seconds by phase since the last step."""
        return dict(self._split)

    def set_range(self, done: int, total: int) -> None:
        """Estimates the remaining time from the speed since this incarnation started to read."""
        if self._reading is None:
            self._reading = done, self.clock()
        before, since = self._reading
        spent = self.clock() - since
        left = (total - done) * spent / (done - before) if done > before else None
        self.range = RangeProgress(done, total, left)

    def add_step(self, report: StepReport) -> None:
        self.last = report
        self.version, self.incarnation = report.version, report.incarnation
        if (reward := report.metrics.get("reward_mean")) is not None:
            self.rewards.append(reward)
        self._splits.append(self._split)
        self._split = defaultdict(float)

    def split(self) -> dict[str, float]:
        """Shares of the time by phase, over the last steps and up to now."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for part in (*self._splits, self._split):
            for phase, spent in part.items():
                seconds[phase] += spent
        total = sum(seconds.values())
        return {phase: spent / total for phase, spent in seconds.items()} if total else {}

    def add_alarm(self, sentence: str) -> None:
        """Adds an alarm; it replaces an earlier one of the same name."""
        name = alarm_name(sentence)
        earlier = next((alarm for alarm in self.alarms if alarm.name == name), None)
        if earlier is not None:
            self.alarms.remove(earlier)
        times = 1 + (earlier.times if earlier is not None else 0)
        self.alarms.append(RaisedAlarm(name, sentence, self.version, times))
