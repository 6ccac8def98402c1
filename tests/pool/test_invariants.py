"""The invariants of the log, each under its name, checked on what a real broker holds at the end.

A pipeline runs once: agents write Steps under several versions, a reward worker copies them, a
trainer decides. Both workers crash again and again in the middle of their transactions. The agents
misbehave in every way that the rules speak of. Afterwards the topics alone must tell that nothing
was lost, repeated, mixed up or too old.
"""

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from zlib import crc32

import msgspec
import pytest
from confluent_kafka import Producer as ConfluentProducer

from pool import topics
from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from pool.core.groups import Group, GroupRules
from pool.core.ledger import GroupId, Ledger
from pool.core.marks import PolicyMarks
from pool.core.progress import WorkItem
from pool.core.prompts import full_prompts
from pool.core.trajectories import (
    StrayRecord,
    Trajectory,
    TrajectoryAssembler,
    annotate,
    source_position,
)
from pool.producers.output import Output, producer_options
from pool.readers.decision_batch import read_batch, trained_members
from pool.topics import DEAD_LETTERS, LEDGER, POLICY, REWARDED, STEPS
from schemas import (
    Codec,
    Decision,
    PartitionOffsets,
    PolicyVersion,
    Position,
    Record,
    Step,
    StepNote,
    TrajectoryEnd,
)
from steplog.kafka import local_kafka
from tests.pool.decider import Decider
from tests.pool.log import identity, key_of, messages, records, until, write
from tests.pool.records import RUN, child, end, feedback, step

pytestmark = pytest.mark.broker

PARTITIONS = 3
VERSIONS = 4
MAX_AGE = 2
RULES = GroupRules(group_size=4, quorum=0.5)
CRASHES = 5


class Crash(Exception):
    """Ends a worker in the middle of what it does, committing nothing."""


def crashing(seed: int) -> Callable[[str], None]:
    """A probe that crashes once, somewhere."""
    left = random.Random(seed).randint(1, 6)

    def probe(stage: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash(stage)

    return probe


@dataclass
class History:
    """What the topics hold after the pipeline has come to rest."""

    connection: Connection
    steps: list[tuple[Position, Record]]
    poison: int
    rewarded: list[tuple[Position, Record]]
    decisions: list[Decision]
    marks: PolicyMarks
    dead_letters: int
    samples: list[list[PartitionOffsets]] = field(default_factory=list)
    """What the reward workers' group had, as it went on."""

    def trained_groups(self) -> Iterator[tuple[Decision, list[Group]]]:
        for decision in self.decisions:
            yield decision, asyncio.run(read_batch(self.connection, Codec(), decision))


@pytest.fixture(scope="module")
def history(kafka: local_kafka.Broker) -> History:
    connection = Connection(bootstrap=kafka.bootstrap, topic_prefix="invariants.")
    topics.create(connection, PARTITIONS)
    poison = run_agents(connection)
    samples = run_rewards(connection)
    marks = run_decisions(connection)
    return History(
        connection=connection,
        steps=decoded(connection, STEPS),
        poison=poison,
        rewarded=decoded(connection, REWARDED),
        decisions=[d for d in records(connection, LEDGER) if isinstance(d, Decision)],
        marks=marks,
        dead_letters=len(messages(connection, DEAD_LETTERS)),
        samples=samples,
    )


def decoded(connection: Connection, topic: str) -> list[tuple[Position, Record]]:
    found = []
    for message in messages(connection, topic):
        with suppress(ValueError):
            place = Position(partition=message.partition, offset=message.offset)
            found.append((place, Codec().decode(message.value)))
    return found


# The agents


def run_agents(connection: Connection) -> int:
    """Writes under one version after the other; gives the number of poison records."""
    for version in range(VERSIONS):
        open_version(connection, version)
        write(connection, STEPS, list(misbehaviour(version)))
        write(connection, STEPS, [r for n in range(6) for r in group(f"v{version}-{n}", version)])
    producer = ConfluentProducer(producer_options(connection))
    for number in range(5):
        producer.produce(connection.topic_name(STEPS), b"\xc3\x01 not a record", f"p{number}")
    producer.flush()
    return 5


def open_version(connection: Connection, version: int) -> None:
    marks = {}
    for topic in (STEPS, REWARDED):
        ends: Counter[int] = Counter()
        for message in messages(connection, topic):
            ends[message.partition] = max(ends[message.partition], message.offset + 1)
        marks[topic] = [ends[partition] for partition in range(PARTITIONS)]
    opened = PolicyVersion(
        run=RUN,
        incarnation=1,
        version=version,
        phase="opened",
        steps_marks=marks[STEPS],
        rewarded_marks=marks[REWARDED],
    )
    write(connection, POLICY, [opened])


def group(prompt: str, version: int) -> Iterator[Record]:
    """A well-behaved group of four; two turns each, the second a delta of the first."""
    for number in range(4):
        uid = f"{prompt}-{number}"
        ids = list(range(30))
        first = step(f"{uid}-a", uid, prompt, ids=ids, version=version, group_size=4)
        yield first
        yield turn(f"{uid}-b", first)
        yield end(uid, prompt, steps=2, reward=float(number))


def turn(step_id: str, parent: Step) -> Step:
    second = child(step_id, parent, [*range(30), 4, 5], [77])
    return msgspec.structs.replace(second, segments=parent.segments)


def misbehaviour(version: int) -> Iterator[Record]:
    p = f"odd-{version}"
    # a failed member, one without reward, one with a hole: too few are left of four
    yield from (step(f"{p}-f", f"{p}-failed", p, version=version),)
    yield end(f"{p}-failed", p, status="failed", reason="out of memory")
    yield step(f"{p}-n", f"{p}-unrewarded", p, version=version)
    yield end(f"{p}-unrewarded", p)
    yield step(f"{p}-h", f"{p}-hole", p, version=version)
    yield end(f"{p}-hole", p, steps=2, reward=1.0)
    yield step(f"{p}-g", f"{p}-good", p, version=version)
    yield end(f"{p}-good", p, reward=1.0)
    # a repeated record, a Step and an End after the end
    yield step(f"{p}-g", f"{p}-good", p, version=version)
    yield step(f"{p}-late", f"{p}-good", p, index=1, version=version)
    yield end(f"{p}-good", p, end_id=f"{p}-second-end", reward=0.0)
    # another channel
    yield step(f"{p}-v", f"{p}-val", p, version=version, channel="val")
    yield end(f"{p}-val", p, channel="val", reward=1.0)
    # a retry whose first answer nobody received, and a reward that comes later
    q = f"retry-{version}"
    for number in range(4):
        uid = f"{q}-{number}"
        lost = step(f"{uid}-lost", uid, q, version=version, request_hash=b"same")
        yield lost
        yield undelivered(lost)
        yield step(f"{uid}-kept", uid, q, index=1, version=version, request_hash=b"same")
        yield end(uid, q, steps=2, reward_expected=True)
    for number in range(4):
        yield feedback(0.25 * number, f"{q}-{number}", q)
    # a group that never becomes whole
    yield step(f"{p}-o", f"{p}-open", f"open-{version}", version=version)
    yield end(f"{p}-open", f"open-{version}", reward=1.0)


def undelivered(lost: Step) -> StepNote:
    return StepNote(
        note_id=f"{lost.step_id}-note",
        step_id=lost.step_id,
        trajectory_uid=lost.trajectory_uid,
        prompt_uid=lost.prompt_uid,
        run=RUN,
        delivered=False,
    )


# The workers


def run_rewards(connection: Connection) -> list[list[PartitionOffsets]]:
    samples: list[list[PartitionOffsets]] = []
    expected = {identity(record) for _, record in decoded(connection, STEPS)}

    def is_done() -> bool:
        return {identity(record) for _, record in decoded(connection, REWARDED)} >= expected

    for seed in range(CRASHES):
        with suppress(Crash):
            reward(connection, crashing(seed), is_done, samples)
    reward(connection, lambda stage: None, is_done, samples)
    return samples


def reward(
    connection: Connection,
    probe: Callable[[str], None],
    is_done: Callable[[], bool],
    samples: list[list[PartitionOffsets]],
) -> None:
    worker: StatefulConsumer[Trajectory | StrayRecord] = StatefulConsumer(
        connection,
        topic=STEPS,
        group="invariants-reward",
        transactional_id="invariants-reward-0",
        assembler=lambda partition: TrajectoryAssembler(),
        codec=Codec(),
        probe=probe,
    )
    waiting: list[WorkItem[Trajectory | StrayRecord]] = []
    turns = itertools.count()
    with worker:

        def work() -> None:
            waiting.extend(worker.poll())
            # Half of the prompts stay pending over the commit, as with a slow judge; the items of
            # one prompt keep their order.
            chosen = next(turns) % 2
            now = [item for item in waiting if crc32(prompt_of(item.item).encode()) % 2 == chosen]
            waiting[:] = [item for item in waiting if item not in now]
            for item in now:
                worker.finish([item], copies(connection, item.item))
            worker.commit()
            samples.append(worker.offsets())

        until(is_done, work)


def prompt_of(item: Trajectory | StrayRecord) -> str:
    return item.prompt_uid if isinstance(item, Trajectory) else key_of(item.received.record)


def copies(connection: Connection, item: Trajectory | StrayRecord) -> list[Output]:
    if isinstance(item, StrayRecord):
        marked = {} if item.verdict is None else {"not_trainable": item.verdict}
        fields = marked if isinstance(item.received.record, Step) else {}
        return [
            copy(
                connection, annotate(item.received.record, source_position(item.received), **fields)
            )
        ]
    return [
        copy(
            connection,
            annotate(one.record, source_position(one), not_trainable="orphan")
            if isinstance(one.record, Step) and one.record.step_id in item.orphans
            else annotate(one.record, source_position(one)),
        )
        for one in item.records
    ]


def copy(connection: Connection, record: Record) -> Output:
    prompt_uid = str(getattr(record, "prompt_uid"))  # noqa: B009
    return Output(connection.topic_name(REWARDED), prompt_uid, Codec().encode(record))


def run_decisions(connection: Connection) -> PolicyMarks:
    versions = [r for r in records(connection, POLICY) if isinstance(r, PolicyVersion)]
    marks = PolicyMarks(RUN, versions)

    def ledger() -> Ledger:
        return Ledger(RUN, records(connection, LEDGER))

    ended = len({uid for uid, _ in first_ends(decoded(connection, REWARDED))})

    def is_done() -> bool:
        return sum(ledger().verdicts.values()) == ended - VERSIONS  # the groups left open

    for seed in range(CRASHES):
        with suppress(Crash):
            decide(connection, ledger(), marks, crashing(seed), is_done)
    decide(connection, ledger(), marks, lambda stage: None, is_done)
    return marks


def decide(
    connection: Connection,
    ledger: Ledger,
    marks: PolicyMarks,
    probe: Callable[[str], None],
    is_done: Callable[[], bool],
) -> None:
    decider = Decider(connection, ledger, marks, RULES, MAX_AGE, probe)
    with decider.consumer:
        until(is_done, decider.turn)


def first_ends(log: list[tuple[Position, Record]]) -> Iterator[tuple[str, TrajectoryEnd]]:
    seen = set()
    for _, record in log:
        if isinstance(record, TrajectoryEnd) and record.trajectory_uid not in seen:
            seen.add(record.trajectory_uid)
            yield record.trajectory_uid, record


# The invariants


def test_i3_rewarded_complete(history: History) -> None:
    written = {identity(record) for _, record in history.steps}
    assert {identity(record) for _, record in history.rewarded} == written
    sources = Counter(source_of(record) for _, record in history.rewarded)
    assert set(sources.values()) == {1}, "no record was copied twice"
    effective = Counter(
        record.step_id
        for _, record in history.rewarded
        if isinstance(record, Step) and record.not_trainable != "late"
    )
    assert set(effective.values()) == {1}
    assert history.dead_letters == history.poison


def source_of(record: Record) -> Position:
    place = getattr(record, "source")  # noqa: B009
    assert isinstance(place, Position)
    return place


def test_i4_group_integrity(history: History) -> None:
    groups = [group for decision in history.decisions for group in decision.groups]
    at = dict(history.rewarded)
    assert sum(group.verdict == "train" for group in groups) >= 6
    for group in groups:
        uids = [member.trajectory_uid for member in group.members]
        assert len(uids) == len(set(uids))
        for member in group.members:
            for offset in member.offsets:
                record = at[Position(partition=group.partition, offset=offset)]
                assert getattr(record, "prompt_uid") == group.prompt_uid  # noqa: B009
                assert getattr(record, "trajectory_uid") == member.trajectory_uid  # noqa: B009


def test_i5_order(history: History) -> None:
    for _, groups in history.trained_groups():
        for trajectory in (member for group in groups for member in group.members.values()):
            indices = [received.record.step_index for received in trajectory.steps]  # type: ignore[attr-defined]
            assert indices == sorted(indices)
            steps = [r.record for r in trajectory.records if isinstance(r.record, Step)]
            prompts = full_prompts(steps)  # raises when a parent does not come before its child
            assert all(len(prompts[s.step_id]) >= s.prefix_length * 4 for s in steps)


def test_i6_rebuild(history: History) -> None:
    newest: dict[int, int] = {}
    ends_at = {r.trajectory_uid: p for p, r in history.steps if isinstance(r, TrajectoryEnd)}
    first: dict[str, Position] = {}
    for place, record in history.steps:
        if isinstance(record, Step):
            first.setdefault(record.trajectory_uid, place)
    for sample in history.samples:
        for at in sample:
            assert at.committed >= newest.get(at.partition, at.committed), "it went backwards"
            newest[at.partition] = at.committed
            open_ = [
                place.offset
                for uid, place in first.items()
                if place.partition == at.partition
                and place.offset < at.committed <= ends_at[uid].offset
            ]
            assert at.rebuild <= min(open_, default=at.committed)
    assert newest, "something was committed"


def test_i7_no_double_training(history: History) -> None:
    trained_in: defaultdict[GroupId, list[int]] = defaultdict(list)
    for decision in history.decisions:
        for group in decision.groups:
            if group.verdict == "train":
                group_id = GroupId(group.partition, group.prompt_uid, group.first_offset)
                trained_in[group_id].append(decision.sequence)
    assert trained_in
    assert all(len(sequences) == 1 for sequences in trained_in.values())
    sequences = [decision.sequence for decision in history.decisions]
    assert sequences == list(range(1, len(sequences) + 1))


def test_i8_staleness(history: History) -> None:
    for place, record in history.steps:
        if isinstance(record, Step):
            by_offset = history.marks.version_at(place)
            assert by_offset is not None
            assert max(segment.version for segment in record.segments) <= by_offset
    newest = history.marks.opened
    assert newest == VERSIONS - 1
    for _, groups in history.trained_groups():
        for trajectory in (member for group in groups for member in group.members.values()):
            for received in trajectory.steps:
                assert isinstance(received.record, Step)
                oldest = min(segment.version for segment in received.record.segments)
                assert newest - oldest <= MAX_AGE
    verdicts = Ledger(RUN, history.decisions).verdicts
    assert verdicts["stale"], "the oldest version is refused"


def test_i11_accounting(history: History) -> None:
    ended = {uid for uid, _ in first_ends(history.rewarded)}
    open_ = {uid for uid in ended if uid.endswith("-open")}
    verdicts = Ledger(RUN, history.decisions).verdicts
    assert len(ended) == sum(verdicts.values()) + len(open_)
    assert verdicts["other_channel"] == VERSIONS
    assert verdicts["train"] > 0
    assert verdicts["invalid"] == 3 * VERSIONS, "failed, without reward, with a hole"


def test_i12_replay(history: History) -> None:
    once = [bytes_of(groups) for _, groups in history.trained_groups()]
    again = [bytes_of(groups) for _, groups in history.trained_groups()]
    assert once == again
    uids = [
        [[m.trajectory_uid for m in trained_members(g)] for g in d.groups if g.verdict == "train"]
        for d in history.decisions
    ]
    replayed = [[list(group.members) for group in groups] for _, groups in history.trained_groups()]
    assert replayed == uids


def test_a_replayed_group_has_the_rewards_that_came_late(history: History) -> None:
    late = [
        [group.reward(member) for member in group.members.values()]
        for _, groups in history.trained_groups()
        for group in groups
        if group.prompt_uid.startswith("retry-")
    ]
    assert late
    assert all(rewards == [0.0, 0.25, 0.5, 0.75] for rewards in late)


def bytes_of(groups: list[Group]) -> list[bytes]:
    """A batch as bytes: every record, and every prompt in full."""
    trajectories = [trajectory for group in groups for trajectory in group.members.values()]
    return [
        part
        for trajectory in trajectories
        for part in (
            *(Codec().encode(received.record) for received in trajectory.records),
            *(trajectory.prompts[step_id] for step_id in sorted(trajectory.prompts)),
        )
    ]
