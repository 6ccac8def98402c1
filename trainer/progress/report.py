"""What is known of a training run at this moment, apart from who shows it.

The time of the loop goes to its innermost phase, so that the split adds up to the time that has
passed, whatever the phases are nested in.
"""

import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pool.core.marks import Age

Phase = Literal["recovering", "waiting", "training", "opening", "syncing", "checkpointing"]

OTHER = "other"
"""The phase of whatever no phase was told for."""
UNKNOWN = -1.0
"""The age of what other runs have made, where all of it is theirs."""
STEPS_SHOWN = 120
STEPS_SPLIT = 20
"""Steps over which the time split is taken: long enough to be calm, short enough to show a change."""
ALARMS_SHOWN = 3
NAMED = re.compile(r"([a-z][a-z0-9_ ]{0,30}): ")


@dataclass(frozen=True, slots=True)
class Report:
    """One step. Values are told by one name in the ledger, in Prometheus and in every tracker."""

    version: int
    sequence: int
    incarnation: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, since the step before."""
    verdicts: Mapping[str, int] = field(default_factory=dict)
    """Trajectories by verdict, since the run began."""
    alarms: Sequence[str] = ()
    """Sentences; what stands before a colon is the alarm's name."""
    ages: Sequence[Age] = ()
    """Of the trained trajectories."""

    def values(self) -> dict[str, float]:
        """All of it, flat, as trackers take it."""
        return {
            **self.metrics,
            **{f"seconds/{phase}": seconds for phase, seconds in self.timings.items()},
            **{f"trajectories/{verdict}": count for verdict, count in self.verdicts.items()},
            "alarms": len(self.alarms),
            "incarnation": self.incarnation,
        }


@dataclass(slots=True)
class Alarm:
    """An alarm, the last time that it was raised."""

    name: str
    sentence: str
    version: int | None
    times: int = 1


def alarm_name(sentence: str) -> str:
    """Few and fixed, for a label: a sentence may hold any number."""
    named = NAMED.match(sentence)
    return named[1] if named else "other"


@dataclass(frozen=True, slots=True)
class Range:
    """How many offsets of a range are read, and how long the others will take."""

    done: int
    total: int
    seconds_left: float | None = None

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0


class Status:
    """Everything that can be shown. Whoever reads or writes it holds `lock`: the loop writes, a
    view reads from a thread of its own."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self.run = run
        self.incarnation: int | None = None
        self.version: int | None = None
        self.ready = 0
        self.wanted = 0
        self.lag: int | None = None
        self.range: Range | None = None
        """Of a run that reads a range, which ends."""
        self.recovered = 0
        self.to_recover = 0
        self.engines_ok: Sequence[str] = ()
        self.engines_failed: Sequence[str] = ()
        self.last: Report | None = None
        self.rewards: deque[float] = deque(maxlen=STEPS_SHOWN)
        self.alarms: deque[Alarm] = deque(maxlen=ALARMS_SHOWN)
        self.clock = clock
        self._reading: tuple[int, float] | None = None
        """Where this life began to read, and when."""
        self._phases: list[str] = [OTHER]
        self._splits: deque[defaultdict[str, float]] = deque(maxlen=STEPS_SPLIT)
        self._split: defaultdict[str, float] = defaultdict(float)
        self.started = self.changed = self._counted = clock()

    @property
    def phase(self) -> str:
        """As a person sees it: while a run is recovered, whatever is done is part of that."""
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
        """Gives the phase that was on until now, and its seconds since they were last counted."""
        counted, shown = self.count(), self.phase
        self._phases.append(phase)
        self._note_change(shown)
        return counted

    def leave(self) -> tuple[str, float]:
        counted, shown = self.count(), self.phase
        self._phases.pop()
        self._note_change(shown)
        return counted

    def _note_change(self, shown: str) -> None:
        if self.phase != shown:
            self.changed = self._counted

    def count(self) -> tuple[str, float]:
        now, before, phase = self.clock(), self._counted, self._phases[-1]
        self._counted = now
        if now > before:
            self._split[phase] += now - before
        return phase, now - before

    def timings(self) -> dict[str, float]:
        """Seconds by phase since the last step."""
        return dict(self._split)

    def reached(self, done: int, total: int) -> None:
        """So much of the range is read. It goes on as fast as it went since this life began to read."""
        if self._reading is None:
            self._reading = done, self.clock()
        before, since = self._reading
        spent = self.clock() - since
        left = (total - done) * spent / (done - before) if done > before else None
        self.range = Range(done, total, left)

    def step(self, report: Report) -> None:
        self.last = report
        self.version, self.incarnation = report.version, report.incarnation
        if (reward := report.metrics.get("reward_mean")) is not None:
            self.rewards.append(reward)
        self._splits.append(self._split)
        self._split = defaultdict(float)

    def split(self) -> dict[str, float]:
        """Shares of the time by phase, over the last steps and since then."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for part in (*self._splits, self._split):
            for phase, spent in part.items():
                seconds[phase] += spent
        total = sum(seconds.values())
        return {phase: spent / total for phase, spent in seconds.items()} if total else {}

    def raised(self, sentence: str) -> None:
        """Notes an alarm; one of the same name takes the place of the earlier."""
        name = alarm_name(sentence)
        before = next((alarm for alarm in self.alarms if alarm.name == name), None)
        if before is not None:
            self.alarms.remove(before)
        times = 1 + (before.times if before is not None else 0)
        self.alarms.append(Alarm(name, sentence, self.version, times))
