"""The reward worker: reads `steps`, scores whole trajectories, writes `rewarded`.

    consumer.poll ──► isolated processes ──► event loop ──► outputs, in the order of each key
                       (plain functions)      (async ones)        └──► one transaction with the offsets

The thread that runs `run` owns the consumer: it polls, collects what is scored, and commits. Scoring
happens elsewhere. A worker that is killed has written each output once or not at all, and what was
being scored is scored again by whoever gets the partition.

A worker with a tag writes to the tag's topic and nowhere else: deadlines are kept and letters put
aside by those without one, or it would be done once for every tag.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.core.dead_letters import DeadLetter, PoisonLimiter
from pool.core.progress import Progress, WorkItem
from pool.core.trajectories import (
    StrayRecord,
    Trajectory,
    TrajectoryAssembler,
    annotated,
    source,
    step_of,
)
from pool.producers.sender import Output
from pool.readers.dataset import began_too_early
from pool.readers.selection import Selection
from pool.topics import DEAD_LETTERS, STEPS, TRAJECTORIES, rewarded_topic
from reward import metrics
from reward.expiry import overdue
from reward.function import Function
from reward.isolated import UNAVAILABLE, Isolated, failed
from reward.queues import KeyOrder
from reward.remote import Remote
from reward.score import Opinion, is_scored, rewarded
from reward.texts import Texts
from reward.view import TrajectoryView
from schemas import Record, TrajectoryEnd
from servicekit import tracing
from servicekit.errors import Fatal
from servicekit.metrics import dead_letters, last_progress, show_lag
from servicekit.spans import NOTHING, Span
from servicekit.tokenizer import TokenizerFolder

log = logging.getLogger(__name__)

STAGE = "reward"
LOOK_FOR_OVERDUE = 5.0
LOOK_AT_LAG = 5.0
WAIT_FOR_OUTAGE = 2.0
POLL = 0.05
PROBATION = 10.0
"""Seconds for which failures are held back until something has been scored: a worker that fails on
everything stops before it has written any of it, however often it is started again."""

Item = Trajectory | StrayRecord


@dataclass(eq=False)
class Job:
    """A piece of work on its way. `back` is told when every function has spoken."""

    item: Item
    back: Callable[["Job"], None]
    work: WorkItem[Item] | None = None
    opinions: list[Opinion] = field(default_factory=list)
    is_wanted: Callable[[], bool] = lambda: True
    """Not when its partition went to another worker."""
    span: Span = NOTHING

    @property
    def failure(self) -> Opinion | None:
        """Of the first function that failed on it."""
        return next((opinion for opinion in self.opinions if opinion.failure is not None), None)

    @property
    def key(self) -> str:
        record = self.item.end if isinstance(self.item, Trajectory) else self.item.received.record
        return str(getattr(record, "prompt_uid", ""))


class Scorer:
    """Runs a trajectory through all functions, wherever they run."""

    def __init__(
        self,
        specs: Sequence[str],
        functions: Sequence[Function],
        tokenizer: str | None,
        processes: int,
    ) -> None:
        plain = [function for function in functions if not function.is_async]
        others = [function for function in functions if function.is_async]
        self.remote = Remote(others)
        self._texts = Texts(tokenizer)
        self._functions = functions
        self._tokenizer = TokenizerFolder(tokenizer) if tokenizer and functions else None
        self._order = {function.name: at for at, function in enumerate(functions)}
        self._asks = bool(others)
        self._numbers = count()
        self._jobs: dict[int, Job] = {}
        self._isolated = (
            Isolated(specs, plain, tokenizer, processes, self._plain_done, self._is_wanted)
            if plain
            else None
        )

    def submit(self, job: Job) -> None:
        if not isinstance(job.item, Trajectory) or not is_scored(job.item):
            job.back(job)
        elif (why := self._misread(job.item)) is not None:
            job.opinions = [failed(function, why) for function in self._functions]
            job.back(job)
        elif self._isolated is not None:
            number = next(self._numbers)
            self._jobs[number] = job
            self._isolated.submit(number, job.item)
        else:
            self._ask(job)

    def _misread(self, trajectory: Trajectory) -> str | None:
        """Why functions would see another text than the one that was sampled."""
        if self._tokenizer is None:
            return None
        recorded = {step_of(received).tokenizer for received in trajectory.steps}
        other = next((name for name in recorded if not self._tokenizer.made(name)), None)
        return f"the tokenizer {self._tokenizer.difference(other)}" if other else None

    def check(self) -> None:
        """Raises when something that scores has ended: waiting for it would be for ever."""
        trouble = self.remote.trouble
        if self._isolated is not None:
            trouble = trouble or self._isolated.trouble
        if isinstance(trouble, Fatal):
            raise trouble
        if trouble is not None:
            raise Fatal(f"scoring has stopped: {trouble!r}") from trouble

    def _is_wanted(self, number: int) -> bool:
        return self._jobs[number].is_wanted()

    def _plain_done(self, number: int, opinions: list[Opinion]) -> None:
        job = self._jobs.pop(number)
        failed = [o for o in opinions if o.failure is not None]
        away = [o for o in failed if str(o.failure).startswith(UNAVAILABLE)]
        if away and away == failed and job.is_wanted():
            self.remote.waits(away[0].name, str(away[0].failure).removeprefix(UNAVAILABLE))
            self.remote.later(WAIT_FOR_OUTAGE, lambda: self.submit(job))
            return
        job.opinions += opinions
        self._ask(job)

    def _ask(self, job: Job) -> None:
        if not self._asks or job.failure is not None:
            self._end(job)
        else:
            self.remote.start(self._ask_remote(job))

    async def _ask_remote(self, job: Job) -> None:
        assert isinstance(job.item, Trajectory)
        view = TrajectoryView(job.item, self._texts.decode)
        job.opinions += await self.remote.opinions(view, job.is_wanted)
        self._end(job)

    def _end(self, job: Job) -> None:
        job.opinions.sort(key=lambda opinion: self._order[opinion.name])
        job.back(job)

    def close(self) -> None:
        if self._isolated is not None:
            self._isolated.close()
        self.remote.close()


class Worker:
    """One member of the group. `into` is the tag that it writes for; a `selection` of trajectories,
    up to `ends`, is for scoring again."""

    def __init__(
        self,
        connection: Connection,
        group: str,
        slot: str,
        scorer: Scorer,
        at_once: int,
        into: str | None = None,
        selection: Selection | None = None,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        self._connection = connection
        self._codec = connection.codec()
        self._scorer = scorer
        self._group = group
        self._is_first = into is None
        self._selection = selection
        self._rewarded = rewarded_topic(into)
        self._names = {
            topic: connection.topic_name(topic)
            for topic in (STEPS, self._rewarded, TRAJECTORIES, DEAD_LETTERS)
        }
        self.tally: Counter[str] = Counter()
        """What became of trajectories since this worker started."""
        self._order: KeyOrder[Job] = KeyOrder()
        self._scored: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._limiter = PoisonLimiter()
        self._held: list[Job] = []
        self._held_until = 0.0
        self._has_scored = False
        self._in_hand = 0
        self._next_look = 0.0
        self._next_lag = 0.0
        self._ended: dict[str, Progress[Item]] = {}
        self.last_progress = time.monotonic()
        self._consumer: StatefulConsumer[Item] = StatefulConsumer(
            connection,
            topic=STEPS,
            group=group,
            transactional_id=f"{group}-{connection.topic_prefix}{slot}",
            assembler=lambda partition: TrajectoryAssembler(),
            codec=self._codec,
            max_waiting=at_once,
            ends=ends,
            dead_letters=self._is_first,
        )

    def run(self, stop: threading.Event, is_done: Callable[[], bool] = lambda: False) -> None:
        with self._consumer:
            while not stop.is_set() and not is_done():
                self.turn()

    def turn(self) -> None:
        """One round: read, hand out, collect, commit."""
        self._scorer.check()
        for work in self._consumer.poll(POLL):
            self._take(work)
        self._collect()
        self._end_overdue()
        if self._consumer.commit():
            self.last_progress = time.monotonic()
            last_progress.set_to_current_time()
        metrics.in_hand.set(self._in_hand)
        self._show_lag()

    def _show_lag(self) -> None:
        if (now := time.monotonic()) < self._next_lag:
            return
        self._next_lag = now + LOOK_AT_LAG
        show_lag(self._group, self._names[STEPS], self._consumer.lags())

    def _take(self, work: WorkItem[Item]) -> None:
        if self._selection is not None and not self._is_selected(work.item, self._selection):
            self._consumer.finish([work], [])
            return
        job = Job(work.item, self._scored.put, work, is_wanted=lambda: self._is_ours(work))
        if tracing.is_on() and isinstance(work.item, Trajectory):
            job.span = self._span(work.item)
        self._order.add(job.key, job)
        self._in_hand += 1
        self._scorer.submit(job)

    def _span(self, item: Trajectory) -> Span:
        """The End is why it is scored; the Steps are what is."""
        return tracing.span(
            f"process {self._names[STEPS]}",
            "consumer",
            item.trace,
            [step.trace for step in item.steps if step.trace],
            system="kafka",
            messaging="process",
            messaging_type="process",
            topic=self._names[STEPS],
            group=self._group,
            steps=len(item.steps),
            **_ids(item.end),
        )

    def _is_selected(self, item: Item, selection: Selection) -> bool:
        if began_too_early(item):
            self.tally["missed"] += 1
            return False
        return selection.has_item(item)

    def _is_ours(self, work: WorkItem[Item]) -> bool:
        return self._consumer.assignment(work.assignment.partition) is work.assignment

    def _collect(self) -> None:
        self._release()
        while not self._scored.empty():
            job = self._scored.get()
            for ready in self._order.complete(job.key, job):
                self._in_hand -= 1
                if ready.is_wanted():
                    self._judge(ready)
                    self._held.append(ready)
                else:
                    ready.span.end()
        self._release()

    def _release(self) -> None:
        if self._has_scored or time.monotonic() >= self._held_until:
            for job in self._held:
                assert job.work is not None
                self._consumer.finish([job.work], self._outputs(job))
                job.span.end()
            self._held.clear()

    def _judge(self, job: Job) -> None:
        """Stops a worker that fails on most of what it scores."""
        failure = job.failure
        if failure is None:
            if job.opinions:
                self._has_scored = True
                self._limiter.good()
            return
        if (now := time.monotonic()) >= self._held_until:
            self._held_until = now + PROBATION
        self._limiter.bad(f"reward {failure.name}: {failure.failure}")

    def _outputs(self, job: Job) -> list[Output]:
        item = job.item
        if isinstance(item, StrayRecord):
            copy = annotated(item.received.record, source(item.received))
            return [self._output(self._rewarded, copy, item.received.trace)]
        traces = [received.trace for received in item.records]
        traces[-1] = job.span.traceparent or traces[-1]
        copies = zip(rewarded(item, job.opinions), traces, strict=True)
        outputs = [self._output(self._rewarded, record, trace) for record, trace in copies]
        failure = job.failure
        self._count(item, job)
        if failure is None:
            return outputs
        job.span.fail(failure.name)
        # Its words may quote the answer.
        log.warning(
            "trajectory %s: reward %s failed; its End in %s has the reason",
            item.uid,
            failure.name,
            self._names[self._rewarded],
            extra=_ids(item.end),
        )
        return [*outputs, self._letter(item, failure)] if self._is_first else outputs

    def _count(self, item: Trajectory, job: Job) -> None:
        channel = item.end.channel if item.end.channel in ("train", "val") else "other"
        for opinion in job.opinions:
            if opinion.failure is not None:
                metrics.failures.labels(opinion.name).inc()
            elif opinion.value is not None:
                metrics.values.labels(opinion.name, channel).observe(opinion.value)
                metrics.scores.labels(opinion.name, channel).observe(opinion.value)
        metrics.processed.labels("failed" if job.failure else item.end.status).inc()
        self.tally["failed" if job.failure else "scored" if job.opinions else "unscored"] += 1

    def _letter(self, item: Trajectory, failure: Opinion) -> Output:
        """What the function could not score: its End, as it lay in the log."""
        reason = f"reward {failure.name}: {failure.failure}"
        place, value = item.ended, self._codec.encode(item.end, self._names[STEPS])
        key = item.prompt_uid.encode()
        letter = DeadLetter(
            self._names[STEPS], place.partition, place.offset, key, value, (), item.end.created_at
        )
        dead_letters.labels(STAGE, failure.name).inc()
        return Output(
            self._names[DEAD_LETTERS], key, value, letter.headers_with(self._group, reason)
        )

    def _output(self, topic: str, record: Record, trace: str = "") -> Output:
        name = self._names[topic]
        key = getattr(record, "trajectory_uid" if topic == TRAJECTORIES else "prompt_uid", None)
        return Output(name, key, self._codec.encode(record, name), tracing.headers(trace))

    def _end_overdue(self) -> None:
        """Looks for trajectories whose time is up, now and then."""
        now = time.monotonic()
        if now < self._next_look or not self._is_first:
            return
        self._next_look = now + LOOK_FOR_OVERDUE
        before, self._ended = self._ended, {}
        for owned in self._consumer.offsets():
            assignment = self._consumer.assignment(owned.partition)
            if assignment is not None:
                self._end_overdue_of(assignment, before)

    def _end_overdue_of(
        self, assignment: Progress[Item], before: Mapping[str, Progress[Item]]
    ) -> None:
        assert isinstance(assignment.assembler, TrajectoryAssembler)
        for end, closed, trace in overdue(assignment.assembler, int(time.time() * 1000)):
            self._ended[end.end_id] = assignment
            if before.get(end.end_id) is not assignment:
                metrics.expired.inc()
                outputs = [self._output(STEPS, end, trace), self._output(TRAJECTORIES, closed)]
                self._consumer.finish([], outputs, [assignment])
                log.info("trajectory %s has expired", end.trajectory_uid, extra=_ids(end))


def _ids(end: TrajectoryEnd) -> dict[str, str]:
    return {
        "trajectory_uid": end.trajectory_uid,
        "prompt_uid": end.prompt_uid,
        "run": end.run,
    }
