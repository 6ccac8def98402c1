"""A consumer that can die at any moment, without Kafka: what survives it is a `Disk`.

It uses `Progress` as `pool.consumers.consumer` does: records come in batches, items finish in any
order, and outputs, position and bookmark are committed in one step. A test draws a tape of actions
and plays it.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from hypothesis import strategies as st

from pool.core.bookmark import MAX_TEXT, Bookmark
from pool.core.group_assembler import GroupAssembler
from pool.core.groups import Group, GroupRules, UngroupedTrajectory, judge_member
from pool.core.ledger import Ledger
from pool.core.progress import AssembledItem, Assembler, Progress, Received, WorkItem
from pool.core.trajectories import StrayRecord, Trajectory, TrajectoryAssembler
from schemas import DecidedGroup, Decision, PartitionOffsets
from tests.pool.histories import lists_up_to
from tests.pool.records import FAR, RUN, view

ItemT = TypeVar("ItemT", bound=AssembledItem)
Action = Literal["poll", "finish", "commit", "close overdue", "crash"]
Tape = list[tuple[Action, int]]

ACTIONS: list[Action] = ["poll", "poll", "finish", "commit", "close overdue", "crash"]
TAPES: st.SearchStrategy[Tape] = lists_up_to(
    60, st.tuples(st.sampled_from(ACTIONS), st.just(255) | st.integers(0, 255))
)
"""The number says how much, or which ones, bit by bit."""
EVERYTHING: Tape = [("poll", 7), ("finish", 255), ("commit", 255)]


def random_tape(random: Random) -> Tape:
    eager: list[Action] = ["poll", "finish", "commit", "commit", "crash"]
    actions = random.choice([ACTIONS, eager, ["poll", "poll", *ACTIONS]])
    return [
        (random.choice(actions), random.choice([255, random.randrange(256)]))
        for _ in range(random.randint(10, 80))
    ]


def chosen(things: Sequence[Any], bits: int) -> list[Any]:
    return [thing for n, thing in enumerate(things) if bits >> n % 8 & 1]


class Output(NamedTuple):
    """The offset that names an item, and all that can be seen of it."""

    offset: int
    item: Any


@dataclass
class Disk:
    log: list[Received]
    committed: int = 0
    text: str | None = None
    outputs: list[Output] = field(default_factory=list)

    def commit(self, position: int, bookmark: Bookmark, outputs: Sequence[Output]) -> None:
        assert position >= self.committed, "the committed offset went back"
        self.committed, self.text = position, bookmark.encode()
        assert len(self.text) <= MAX_TEXT
        self.outputs += outputs


class Life(ABC, Generic[ItemT]):
    """A consumer from its start to its death."""

    def __init__(self, disk: Disk, assembler: Assembler[ItemT]) -> None:
        self.disk = disk
        start = Bookmark.parse(disk.text, disk.committed)
        self.progress = Progress(0, assembler, disk.committed, start)
        self.position = min(self.progress.read_from(), disk.committed)
        self.progress.reach(self.position)
        self.working: list[WorkItem[ItemT]] = []
        self.finished: list[WorkItem[ItemT]] = []

    def act(self, action: Action, amount: int) -> None:
        if action == "poll":
            self.poll(amount)
        elif action == "finish":
            self.finish(amount)
        elif action == "close overdue" and self.progress.live:
            self.close_overdue(amount)
        elif action == "commit" and self.progress.live:
            self.commit(self.batch(amount))

    def poll(self, amount: int) -> None:
        """Reads a few records; stands right behind them, or behind the transaction markers there."""
        ahead = [received for received in self.disk.log if received.offset >= self.position]
        for received in ahead[: amount % 8]:
            self.position = received.offset + 1
            self.working += self.progress.feed(received)
        if amount & 8:
            rest = (received.offset for received in ahead[amount % 8 :])
            self.position = max(self.position, next(rest, self.position))
        self.working += self.progress.reach(self.position)

    def finish(self, bits: int) -> None:
        self.finished += chosen(self.working, bits)
        self.working = [work for work in self.working if work not in self.finished]

    def close_overdue(self, bits: int) -> None:
        """For those who wait for groups."""

    def batch(self, bits: int) -> list[WorkItem[ItemT]]:
        """What is finished in the last moment."""
        return chosen(self.working, bits)

    def commit(self, batch: Sequence[WorkItem[ItemT]]) -> None:
        done = [*self.finished, *batch]
        bookmark = self.bookmark(done)
        self.disk.commit(self.position, bookmark, [Output(w.offset, view(w.item)) for w in done])
        self.settle(done)

    def settle(self, done: Sequence[WorkItem[ItemT]]) -> None:
        self.progress.close(done)
        self.finished = []
        self.working = [work for work in self.working if work not in done]

    def bookmark(self, done: Sequence[WorkItem[ItemT]]) -> Bookmark:
        bookmark = self.progress.bookmark(self.position, done)
        waiting = [w for w in (*self.working, *self.finished) if w not in done]
        needed = [*self.open_offsets(), *(work.item.first_offset for work in waiting)]
        assert all(bookmark.rebuild <= offset for offset in needed)
        assert set(bookmark.pending) == {work.offset for work in waiting}
        return bookmark

    @abstractmethod
    def open_offsets(self) -> list[int]:
        """Of the first record of everything that is open."""


class RewardLife(Life[Trajectory | StrayRecord]):
    """Waits for whole trajectories."""

    def __init__(self, disk: Disk, memory: int) -> None:
        self.assembler = TrajectoryAssembler(memory)
        super().__init__(disk, self.assembler)

    def open_offsets(self) -> list[int]:
        return [records[0].offset for _, records in self.assembler.open_trajectories()]


class Turn(NamedTuple):
    """What a Decision did to one group, in the order of the log."""

    position: int
    kind: Literal["close", "decide"]
    prompt_uid: str


@dataclass
class TrainerDisk(Disk):
    ledger: Ledger = field(default_factory=lambda: Ledger(RUN))
    turns: list[Turn] = field(default_factory=list)
    decided: list[tuple[DecidedGroup, dict[str, float | None]]] = field(default_factory=list)


class TrainerLife(Life[Group | UngroupedTrajectory | StrayRecord]):
    """Waits for whole groups and decides on them; what it decides goes to the ledger."""

    disk: TrainerDisk

    def __init__(self, disk: TrainerDisk, rules: GroupRules, memory: int) -> None:
        self.rules = rules
        decided, others = disk.ledger.decided_groups(0), disk.ledger.decided_others()
        self.assembler = GroupAssembler(rules, decided, others, memory)
        self.closed: list[tuple[Group, Turn]] = []
        """Overdue groups that were closed, by a Decision that is not committed yet."""
        super().__init__(disk, self.assembler)

    def open_offsets(self) -> list[int]:
        groups = [group.first_offset for group in self.assembler.open_groups()]
        return [*groups, *(group.first_offset for group, _ in self.closed)]

    def finish(self, bits: int) -> None:
        groups = [work for work in self.working if isinstance(work.item, Group)]
        self.working = [work for work in self.working if work not in groups]
        super().finish(bits)
        self.working += groups

    def commit(self, batch: Sequence[WorkItem[Any]]) -> None:
        done = [*self.finished, *batch]
        groups = [*(group for group, _ in self.closed), *(work.item for work in batch)]
        bookmark = self.bookmark(done)
        self.disk.ledger.add(self.decision(groups, bookmark.rebuild))
        self.disk.turns += [turn for _, turn in self.closed]
        self.disk.turns += [Turn(self.position, "decide", group.prompt_uid) for group in groups]
        self.disk.decided += [(judged(group, self.rules), rewards(group)) for group in groups]
        outputs = [Output(work.offset, view(work.item)) for work in self.finished]
        self.disk.commit(self.position, bookmark, outputs)
        self.settle(done)
        self.closed = []
        for group in groups:
            self.assembler.decide(group, self.position)

    def close_overdue(self, bits: int) -> None:
        """The Decision that closes them is not committed yet: the next transaction carries it."""
        for group in chosen(self.assembler.overdue(FAR), bits):
            self.assembler.close(group)
            self.closed.append((group, Turn(self.position, "close", group.prompt_uid)))

    def batch(self, bits: int) -> list[WorkItem[Any]]:
        """Closed groups to decide on: any, but those of one prompt in order."""
        batch: list[WorkItem[Any]] = []
        left: set[str] = set()
        for n, work in enumerate(w for w in self.working if isinstance(w.item, Group)):
            assert isinstance(work.item, Group)
            if bits >> n % 8 & 1 and work.item.prompt_uid not in left:
                batch.append(work)
            else:
                left.add(work.item.prompt_uid)
        return batch

    def decision(self, groups: Sequence[Group], rebuild: int) -> Decision:
        outsiders = (w.item for w in self.finished if isinstance(w.item, UngroupedTrajectory))
        return Decision(
            run=RUN,
            incarnation=1,
            sequence=self.disk.ledger.sequence + 1,
            groups=[judged(group, self.rules) for group in groups],
            others=[outsider.member() for outsider in outsiders],
            offsets=[PartitionOffsets(partition=0, committed=self.position, rebuild=rebuild)],
        )


def judged(group: Group, rules: GroupRules) -> DecidedGroup:
    return group.judge(rules, judge_member)


def rewards(group: Group) -> dict[str, float | None]:
    return {member.uid: group.reward(member) for member in group.members.values()}


def uninterrupted_trajectories(log: Sequence[Received], memory: int) -> list[Output]:
    assembler = TrajectoryAssembler(memory)
    items = ((received.offset, assembler.feed(received)) for received in log)
    return [Output(offset, view(item)) for offset, item in items if item is not None]


class Uninterrupted:
    """A trainer that never dies and closes and decides the same groups at the same places."""

    def __init__(self, disk: TrainerDisk, rules: GroupRules, memory: int) -> None:
        self.rules = rules
        self.assembler = GroupAssembler(rules, memory=memory)
        self.closed: dict[str, list[Group]] = {}
        self.outputs: list[Output] = []
        self.decided: list[tuple[DecidedGroup, dict[str, float | None]]] = []
        turns = list(disk.turns)
        for received in disk.log:
            while turns and turns[0].position <= received.offset:
                self.turn(turns.pop(0))
            self.feed(received)
        for turn in turns:
            self.turn(turn)

    def feed(self, received: Received) -> None:
        item = self.assembler.feed(received)
        if isinstance(item, Group):
            self.closed.setdefault(item.prompt_uid, []).append(item)
        elif item is not None:
            self.outputs.append(Output(received.offset, view(item)))

    def turn(self, turn: Turn) -> None:
        waiting = self.closed.setdefault(turn.prompt_uid, [])
        if turn.kind == "close":
            [group] = [g for g in self.assembler.open_groups() if g.prompt_uid == turn.prompt_uid]
            self.assembler.close(group)
            waiting.append(group)
        else:
            group = waiting.pop(0)
            self.decided.append((judged(group, self.rules), rewards(group)))
            self.assembler.decide(group, turn.position)


def play_rewards(log: list[Received], tape: Tape, memory: int) -> None:
    """Plays a tape, then reads and finishes the rest. All outputs must be those of a life without
    crashes."""
    disk = Disk(log)
    life = RewardLife(disk, memory)
    for action, amount in tape + EVERYTHING * (1 + len(log) // 7):
        if action == "crash":
            life = RewardLife(disk, memory)
        else:
            life.act(action, amount)
    assert each_once(disk.outputs) == uninterrupted_trajectories(log, memory)


def play_trainer(log: list[Received], tape: Tape, memory: int) -> None:
    """The same for Decisions on groups; every trajectory that ended has one verdict."""
    disk, rules = TrainerDisk(log), GroupRules(group_size=2)
    life = TrainerLife(disk, rules, memory)
    for action, amount in tape + EVERYTHING * (1 + len(log) // 7):
        if action == "crash":
            life = TrainerLife(disk, rules, memory)
        else:
            life.act(action, amount)
    truth = Uninterrupted(disk, rules, memory)
    assert disk.decided == truth.decided
    assert each_once(disk.outputs) == truth.outputs
    assert life.assembler.open_groups() == truth.assembler.open_groups()
    still_open = sum(len(group.members) for group in truth.assembler.open_groups())
    assert disk.ledger.verdicts.total() + still_open == trajectories_ended(log, memory)


def trajectories_ended(log: Sequence[Received], memory: int) -> int:
    assembler = TrajectoryAssembler(memory)
    return sum(isinstance(assembler.feed(received), Trajectory) for received in log)


def each_once(outputs: Sequence[Output]) -> list[Output]:
    counts = Counter(output.offset for output in outputs)
    assert all(count == 1 for count in counts.values()), "an item was committed twice"
    return sorted(outputs, key=lambda output: output.offset)
