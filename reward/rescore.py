"""`steplog replay rescore`: a part of the log scored again, into a topic of its own.

    look over the range ──► record the plan ──► score, as a reward worker does, up to the range's end

Nothing is written before the whole range was read once: a tokenizer that does not fit, or a record of
a later version, is found then. After that it is a reward worker with an end
(`pool.consumers.consumer` has the exactly-once part), so it may be killed, run again, and shared by
several processes.
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
from reward.function import Function, load_all
from reward.rescore_view import Done, View, open_view
from reward.settings import RescoreSettings
from reward.tags import Plan
from reward.texts import check_tokenizer
from reward.worker import Scorer, Worker
from servicekit.command_line import INTERRUPTED, print_line
from servicekit.errors import Fatal
from servicekit.process import stopped_by_signals
from servicekit.tokenizer import TokenizerFolder

LOOK_EVERY = 1.0
"""Seconds between two looks at how far all workers have come."""
LOOKED = 1_000
"""Trajectories between two signs of life while the range is looked over."""


def rescore(settings: RescoreSettings, say: Callable[[str], None] = print_line) -> int:
    """Returns the exit status: 0, or INTERRUPTED when it was asked to stop before the end."""
    topic = settings.topic_name(rewarded_topic(settings.into))
    functions = load_all(settings.function)
    check_tokenizer(settings.tokenizer)
    topics.check(settings)
    plan = tags.find_plan(settings, settings.into, functions, settings)
    with open_view(say) as view:
        plan = plan or _begin(settings, functions, view)
        done = Done(topic, settings.into, plan.trajectories)
        is_complete = _score(settings, functions, plan, view, done)
        return 0 if is_complete else INTERRUPTED


def _begin(settings: RescoreSettings, functions: Sequence[Function], view: View) -> Plan:
    ranges, count = _look_over(settings, view)
    plan = tags.make_plan(functions, settings, ranges, count)
    tags.begin(settings, settings.into, plan, ranges)
    return plan


def _look_over(settings: RescoreSettings, view: View) -> tuple[TopicRanges, int]:
    """What was read, and how many trajectories there are; Fatal if they cannot be scored."""
    tokenizer = TokenizerFolder(settings.tokenizer) if settings.tokenizer else None
    count = 0
    with Dataset(settings, STEPS, settings) as dataset:
        for trajectory in dataset:
            if tokenizer is not None:
                for received in trajectory.steps:
                    tokenizer.check(step_of(received).tokenizer)
            count += 1
            if count % LOOKED == 0:
                view.looked(dataset.scan.done, dataset.scan.total, count)
    if count == 0:
        raise Fatal("no trajectory that ended in the range fits the filter, so nothing is scored")
    return dataset.ranges, count


def _score(
    settings: RescoreSettings, functions: Sequence[Function], plan: Plan, view: View, done: Done
) -> bool:
    progress = Progress(settings, plan)
    if not progress.is_over():
        stop = stopped_by_signals()
        scorer = Scorer(settings.function, functions, settings.tokenizer, settings.processes)
        try:
            worker = Worker(
                settings,
                tags.rescore_group(settings.into),
                settings.slot,
                scorer,
                settings.at_once,
                into=settings.into,
                selection=Selection(settings),
                ends=dict(enumerate(plan.ends)),
            )
            progress.show = lambda: view.scored(progress.done, progress.total, worker.tally)
            worker.run(stop, progress.is_over)
            done.tally = worker.tally
        finally:
            scorer.close()
    if progress.is_known_over:
        wait_until_readable(settings, rewarded_topic(settings.into))
        view.finished(done)
    else:
        view.stopped()
    return progress.is_known_over


class Progress:
    """How far all workers of the tag have come, looked at now and then."""

    def __init__(self, settings: RescoreSettings, plan: Plan) -> None:
        self._settings = settings
        self._plan = plan
        self._next_look = 0.0
        self.total = sum(plan.ends) - sum(plan.first)
        self.done = 0
        self.is_known_over = False
        self.show: Callable[[], None] = lambda: None

    def is_over(self) -> bool:
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_EVERY
            found = tags.positions(self._settings, self._settings.into, self._plan)
            self.done = sum(offset for offset, _ in found) - sum(self._plan.first)
            self.is_known_over = all(done for _, done in found)
            self.show()
        return self.is_known_over
