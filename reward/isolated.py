"""Functions that are not asynchronous run in processes of their own.

Nothing in Python can stop a thread: not one that sleeps, not one inside a regular expression that
never ends. A process can be killed. Trajectories go to it in batches, since a message for each would
cost more than most functions do; when it is silent for longer than a function may take, it is killed
and what it had not answered is tried again one by one, so that the guilty one is found.
"""

import ctypes
import multiprocessing
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe

import msgspec

from pool.core.progress import Received
from pool.core.trajectories import Trajectory, TrajectoryAssembler
from reward import metrics
from reward.function import Function, load_all
from reward.score import Opinion
from reward.texts import Texts
from reward.verdict import RewardFailed, RewardUnavailable, as_reward
from reward.view import TrajectoryView
from schemas import Feedback, Step, StepNote, TrajectoryEnd
from servicekit.errors import Fatal

BATCH = 64
FLUSH_EVERY = 0.02
"""Seconds after which results are sent although the batch is not done: a sign of life, too."""
START_LIMIT = 120.0
KINDS: tuple[type[Step] | type[StepNote] | type[Feedback] | type[TrajectoryEnd], ...] = (
    Step,
    StepNote,
    Feedback,
    TrajectoryEnd,
)
UNAVAILABLE = "unavailable: "
"""Begins a failure that is worth waiting for."""
MAX_DETAILS = 256 * 1024
MAX_WHY = 4_000
"""What a function says must fit into a record with the trajectory's End, or it is never written."""
PR_SET_PDEATHSIG = 1


class Sent(msgspec.Struct, array_like=True):
    """A record on its way to the process."""

    kind: int
    record: msgspec.Raw
    partition: int
    offset: int


class Ticket(msgspec.Struct, array_like=True):
    number: int
    records: list[Sent]


class Result(msgspec.Struct, array_like=True):
    number: int
    opinions: list[Opinion]
    seconds: list[float]
    """How long each function took."""


_encode = msgspec.msgpack.Encoder().encode
_tickets = msgspec.msgpack.Decoder(list[Ticket]).decode
_results = msgspec.msgpack.Decoder(list[Result]).decode
_records = [msgspec.msgpack.Decoder(kind).decode for kind in KINDS]


def pack(number: int, trajectory: Trajectory) -> Ticket:
    sent = [
        Sent(KINDS.index(type(r.record)), msgspec.Raw(_encode(r.record)), r.partition, r.offset)
        for r in trajectory.records
    ]
    return Ticket(number, sent)


def unpack(ticket: Ticket) -> Trajectory:
    assembler = TrajectoryAssembler()
    for sent in ticket.records:
        record = _records[sent.kind](sent.record)
        item = assembler.feed(Received(record, sent.partition, sent.offset))
    assert isinstance(item, Trajectory)
    return item


# In the process


def serve(pipe: Pipe, specs: Sequence[str], tokenizer: str | None) -> None:
    """Scores batches until the pipe is closed."""
    _live_and_die_with_the_worker()
    functions = [function for function in load_all(specs) if not function.is_async]
    texts = Texts(tokenizer)
    pipe.send_bytes(b"ready")
    while True:
        try:
            tickets = _tickets(pipe.recv_bytes())
        except EOFError:
            return
        _answer(pipe, tickets, functions, texts)


def _live_and_die_with_the_worker() -> None:
    """A function that never ends would outlive a worker that was killed; Ctrl-C is for the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(
    pipe: Pipe, tickets: Sequence[Ticket], functions: Sequence[Function], texts: Texts
) -> None:
    results: list[Result] = []
    flushed = time.monotonic()
    for ticket in tickets:
        results.append(_score(ticket, functions, texts))
        if time.monotonic() - flushed > FLUSH_EVERY:
            pipe.send_bytes(_encode(results))
            results, flushed = [], time.monotonic()
    pipe.send_bytes(_encode(results))


def _score(ticket: Ticket, functions: Sequence[Function], texts: Texts) -> Result:
    view = TrajectoryView(unpack(ticket), texts.decode)
    result = Result(ticket.number, [], [])
    for function in functions:
        began = time.perf_counter()
        result.opinions.append(_opinion(function, view))
        result.seconds.append(time.perf_counter() - began)
    return result


def _opinion(function: Function, view: TrajectoryView) -> Opinion:
    """What a function says; whatever it raises is a failure of this trajectory only."""
    try:
        return spoken(function, function.call(view), view)
    except RewardUnavailable as error:
        return failed(function, UNAVAILABLE + str(error))
    except RewardFailed as error:
        return failed(function, str(error))
    except Exception as error:
        return failed(function, f"{type(error).__name__}: {error}")


def spoken(function: Function, given: object, view: TrajectoryView) -> Opinion:
    reward = as_reward(given)
    if len(reward.steps) not in (0, len(view.steps)):
        raise RewardFailed(
            f"it returned {len(reward.steps)} rewards of Steps, and there are {len(view.steps)}"
        )
    details = msgspec.json.encode(reward.details).decode() if reward.details else "{}"
    if len(details) > MAX_DETAILS:
        raise RewardFailed(f"its details are {len(details)} characters long; {MAX_DETAILS} may be")
    return Opinion(
        function.name,
        function.version,
        function.weight,
        reward.value,
        [None if step is None else float(step) for step in reward.steps],
        details,
    )


def failed(function: Function, why: str) -> Opinion:
    text = why[:MAX_WHY].encode(errors="replace").decode()  # half a surrogate cannot be written
    return Opinion(function.name, function.version, function.weight, failure=text)


# In the worker


class Isolated:
    """The processes, seen from the worker. `submit` from any thread; `done` is called from ours, with
    nothing for what is not wanted any more when its turn comes."""

    def __init__(
        self,
        specs: Sequence[str],
        functions: Sequence[Function],
        tokenizer: str | None,
        processes: int,
        done: Callable[[int, list[Opinion]], None],
        is_wanted: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._specs = specs
        self._functions = functions
        self._tokenizer = tokenizer
        self._done = done
        self._is_wanted = is_wanted
        self._limit = sum(function.timeout_s for function in functions)
        self._attempts = max(function.attempts for function in functions)
        self._waiting: queue.Queue[Ticket | None] = queue.Queue()
        self._children: list[Child] = []
        self._closing = False
        self.trouble: Exception | None = None
        """Why nothing is scored any more."""
        self._threads = [
            threading.Thread(target=self._run, name=f"reward-{number}", daemon=True)
            for number in range(processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, number: int, trajectory: Trajectory) -> None:
        self._waiting.put(pack(number, trajectory))

    def close(self) -> None:
        """At once, whatever runs: what is not answered is scored again by the next owner."""
        self._closing = True
        for _ in self._threads:
            self._waiting.put(None)
        for child in list(self._children):
            child.end()
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self) -> None:
        try:
            child = self._start()
            while (tickets := self._batch()) is not None:
                left = child.ask(self._wanted(tickets), self._limit, self._done)
                for ticket in left:
                    child = self._alone(child, ticket)
            child.kill()
        except Exception as error:
            self.trouble = error

    def _start(self) -> "Child":
        child = Child(self._specs, self._tokenizer)
        self._children = [other for other in self._children if other.is_alive()] + [child]
        child.wait_until_ready()
        return child

    def _batch(self) -> list[Ticket] | None:
        first = self._waiting.get()
        if first is None or self._closing:
            return None
        batch = [first]
        while len(batch) < BATCH and not self._waiting.empty():
            ticket = self._waiting.get()
            if ticket is None:
                self._waiting.put(None)
                break
            batch.append(ticket)
        return batch

    def _wanted(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        wanted = [ticket for ticket in tickets if self._is_wanted(ticket.number)]
        if len(wanted) < len(tickets):
            kept = {ticket.number for ticket in wanted}
            for ticket in tickets:
                if ticket.number not in kept:
                    self._done(ticket.number, [])
        return wanted

    def _alone(self, child: "Child", ticket: Ticket) -> "Child":
        """One by one, each so often as it may hang."""
        for _ in range(self._attempts):
            if self._closing:
                return child
            if not child.is_alive():
                child = self._start()
            if not child.ask(self._wanted([ticket]), self._limit, self._done):
                return child
        why = f"it did not come back within {self._limit:g} s, or died, {self._attempts} times"
        self._done(ticket.number, [failed(f, why) for f in self._functions])
        return child


class Child:
    """One process."""

    def __init__(self, specs: Sequence[str], tokenizer: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, list(specs), tokenizer), daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        try:
            if self._pipe.poll(START_LIMIT) and self._pipe.recv_bytes() == b"ready":
                return
        except (EOFError, OSError):
            pass  # it died; why stands on stderr
        self.kill()
        raise Fatal("a process for reward functions did not start; is --function still there?")

    def ask(
        self, tickets: list[Ticket], limit: float, done: Callable[[int, list[Opinion]], None]
    ) -> list[Ticket]:
        """Gives what was not answered: then the process was silent for too long, and is killed."""
        left = {ticket.number: ticket for ticket in tickets}
        if not left:
            return []
        try:
            self._pipe.send_bytes(_encode(tickets))
            while left and self._pipe.poll(limit):
                for result in _results(self._pipe.recv_bytes()):
                    del left[result.number]
                    for opinion, seconds in zip(result.opinions, result.seconds, strict=True):
                        metrics.seconds.labels(opinion.name).observe(seconds)
                    done(result.number, result.opinions)
        except (EOFError, OSError):
            pass  # it died, by its own hand or for want of memory
        if left:
            self.kill()
        return list(left.values())

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        """From any thread: whoever waits for an answer learns that there will be none."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
