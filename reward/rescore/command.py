"""`steplog replay rescore`: scores a part of the log again, into a topic of its own.

    read the range once ──► record the plan ──► score like a reward worker, up to the range's end

Nothing is written before the whole range was read once: this finds a tokenizer that does not fit, or
a record of a later version. From then on it is a reward worker with an end (`pool.consumers.consumer`
has the exactly-once part), so it may be killed, run again, and shared by several processes.
"""

import time
from collections.abc import Callable, Sequence

from pool import topics
from pool.core.trajectories import step_of
from pool.readers.dataset import Dataset
from pool.readers.end_offsets import wait_until_readable
from pool.readers.selection import Selection, TopicRanges
from pool.topics import STEPS, rewarded_topic
from reward import tags
from reward.rescore.display import RescoreDisplay, RescoreSummary, open_display
from reward.scoring.loading import RewardFunction, load_all
from reward.scoring.scorer import Scorer
from reward.scoring.text import check_tokenizer
from reward.settings import RescoreSettings
from reward.tags import RescorePlan
from reward.worker.worker import RewardWorker
from servicekit.command_line import INTERRUPTED, print_line
from servicekit.errors import Fatal
from servicekit.process import stop_on_signals
from servicekit.tokenizer import TokenizerFolder

CHECK_INTERVAL_S = 1.0
"""Between two looks at the offsets that all workers have reached."""
DISPLAY_EVERY = 1_000
"""Trajectories between two updates of the display while the range is read."""


def rescore(settings: RescoreSettings, say: Callable[[str], None] = print_line) -> int:
    """Returns the exit status: 0, or INTERRUPTED when it was asked to stop before the end."""
    functions = load_all(settings.function)
    check_tokenizer(settings.tokenizer)
    topics.check(settings)
    plan = tags.find_plan(settings, settings.into, functions, settings, settings.channels)
    with open_display(say) as display:
        plan = plan or _make_plan(settings, functions, display)
        return 0 if _score(settings, functions, plan, display) else INTERRUPTED


def _make_plan(
    settings: RescoreSettings, functions: Sequence[RewardFunction], display: RescoreDisplay
) -> RescorePlan:
    ranges, count = _read_range(settings, display)
    plan = tags.make_plan(functions, settings, settings.channels, ranges, count)
    tags.begin_rescore(settings, settings.into, plan, ranges)
    return plan


def _read_range(settings: RescoreSettings, display: RescoreDisplay) -> tuple[TopicRanges, int]:
    """Returns the offsets of the range and its number of trajectories; raises Fatal if one of them
    cannot be scored."""
    tokenizer = TokenizerFolder(settings.tokenizer) if settings.tokenizer else None
    count = 0
    with Dataset(settings, STEPS, settings) as dataset:
        for trajectory in dataset:
            if trajectory.end.channel not in settings.channels:
                continue
            if tokenizer is not None:
                for received in trajectory.steps:
                    tokenizer.check(step_of(received).tokenizer)
            count += 1
            if count % DISPLAY_EVERY == 0:
                display.show_reading(dataset.scan.done, dataset.scan.total, count)
    if count == 0:
        raise Fatal(
            "No trajectory that ended in the range matches the filter and is in channel "
            f"{' or '.join(settings.channels)}, so there is nothing to score."
        )
    return dataset.ranges, count


def _score(
    settings: RescoreSettings,
    functions: Sequence[RewardFunction],
    plan: RescorePlan,
    display: RescoreDisplay,
) -> bool:
    """Returns whether the range is scored to its end."""
    topic = rewarded_topic(settings.into)
    summary = RescoreSummary(settings.topic_name(topic), settings.into, plan.trajectories)
    progress = RescoreProgress(settings, plan)
    if not progress.is_over():
        stop = stop_on_signals()
        scorer = Scorer(settings.function, functions, settings.tokenizer, settings.processes)
        try:
            worker = RewardWorker(
                settings,
                tags.rescore_group(settings.into),
                settings.slot,
                scorer,
                settings.at_once,
                settings.channels,
                into=settings.into,
                selection=Selection(settings),
                ends=dict(enumerate(plan.ends)),
            )
            progress.on_check = lambda: display.show_scoring(
                progress.done, progress.total, worker.tally
            )
            worker.run(stop, progress.is_over)
            summary.tally = worker.tally
        finally:
            scorer.close()
    if progress.was_over:
        wait_until_readable(settings, topic)
        display.show_summary(summary)
    else:
        display.show_stopped()
    return progress.was_over


class RescoreProgress:
    """How far all workers of the tag have come, checked every second."""

    def __init__(self, settings: RescoreSettings, plan: RescorePlan) -> None:
        self._settings = settings
        self._plan = plan
        self._next_check = 0.0
        self.total = sum(plan.ends) - sum(plan.first)
        self.done = 0
        self.was_over = False
        """At the last check."""
        self.on_check: Callable[[], None] = lambda: None

    def is_over(self) -> bool:
        if (now := time.monotonic()) >= self._next_check:
            self._next_check = now + CHECK_INTERVAL_S
            positions = tags.positions(self._settings, self._settings.into, self._plan)
            self.done = sum(offset for offset, _ in positions) - sum(self._plan.first)
            self.was_over = all(is_done for _, is_done in positions)
            self.on_check()
        return self.was_over
