"""What a tag stands for: one way of scoring, with each trajectory once.

It is recorded in the log, so it holds whatever dies:

* Every End in a tag's topic names the functions that scored it. Others are refused.
* What a rescoring was asked for, and its range, is metadata of a commit: its group's, on the tag's
  topic, made in one request with the offsets from which it reads.
* A live worker of the tag begins where a rescoring of it has ended.

Kafka forgets the commits of a group that nobody is in after a week (`offsets.retention.minutes`). A
topic that has rewards and no place to go on from is refused: it would be filled a second time.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from confluent_kafka import TopicPartition as Place

from pool import topics
from pool.connection import Connection
from pool.consumers.commits import read_commits, set_commits
from pool.core.bookmark import Bookmark
from pool.readers.dataset import LOOK_BACK
from pool.readers.reader import PartitionBounds, read_bounds
from pool.readers.scan import OffsetRange, Scan, received
from pool.readers.selection import SelectionSettings, TopicRanges
from pool.topics import STEPS, rewarded_topic
from reward.function import Function, described
from schemas import TrajectoryEnd
from servicekit.errors import Fatal

TAIL = 1_000
"""Offsets at the end of each partition among which an End is looked for."""
SHOWN = 200
"""Characters of the functions' names that a plan keeps, for people."""


def live_group(tag: str | None) -> str:
    return "steplog-reward" if tag is None else f"steplog-reward-{tag}"


def rescore_group(tag: str) -> str:
    return f"steplog-rescore-{tag}"


class Plan(msgspec.Struct, frozen=True):
    """A rescoring: what was asked for, and which offsets of each partition of `steps` it covers."""

    functions: str
    asked: str
    trajectories: int
    first: list[int]
    ends: list[int]


def make_plan(
    functions: Sequence[Function],
    selection: SelectionSettings,
    ranges: TopicRanges,
    trajectories: int,
) -> Plan:
    spans = [span for _, span in sorted(ranges.spans.items())]
    return Plan(
        _named(functions)[:SHOWN],
        _digest(functions, selection),
        trajectories,
        [span.first for span in spans],
        [span.end for span in spans],
    )


def _digest(functions: Sequence[Function], selection: SelectionSettings) -> str:
    asked = selection.model_dump_json(include=set(SelectionSettings.model_fields))
    text = "\n".join([_named(functions), asked])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _named(functions: Sequence[Function]) -> str:
    return ", ".join(function.described for function in functions)


# Scoring again


def find_plan(
    connection: Connection, tag: str, functions: Sequence[Function], selection: SelectionSettings
) -> Plan | None:
    """The tag's rescoring that has begun; None: it is still to be. Refuses a tag that is taken."""
    topic = rewarded_topic(tag)
    if topic not in topics.find(connection):
        return None
    [commit] = read_commits(connection, rescore_group(tag), [_plan_place(connection, tag)])
    if commit.offset < 0:
        _check_untouched(connection, tag)
        return None
    plan = msgspec.json.decode(commit.metadata or "", type=Plan)
    name = connection.topic_name(topic)
    if plan.functions != _named(functions)[:SHOWN]:
        raise Fatal(
            f"{name} is scored by {plan.functions}, and this would be {_named(functions)}; "
            "give it another tag"
        )
    if plan.asked != _digest(functions, selection):
        raise Fatal(f"{name} was begun with another range or filter; give this one another tag")
    return plan


def begin(connection: Connection, tag: str, plan: Plan, ranges: TopicRanges) -> None:
    """Makes the topic, then records the plan together with where reading begins. Between the two the
    topic is empty, and anybody may begin again."""
    topics.create_twin(connection, tag)
    steps = connection.topic_name(STEPS)
    starts = [
        Place(steps, number, plan.first[number], Bookmark(span.first).text())
        for number, span in ranges.earlier(LOOK_BACK).items()
    ]
    place = _plan_place(connection, tag)
    noted = Place(place.topic, place.partition, 0, msgspec.json.encode(plan).decode())
    set_commits(connection, rescore_group(tag), [*starts, noted])


def positions(connection: Connection, tag: str, plan: Plan) -> list[tuple[int, bool]]:
    """For each partition of `steps` the offset that is reached, and whether the partition is done."""
    places = _places(connection, len(plan.ends))
    found = read_commits(connection, rescore_group(tag), places)
    return [
        (place.offset, place.offset >= end and not _pending(place))
        for place, end in zip(found, plan.ends, strict=True)
    ]


def _pending(place: Place) -> tuple[int, ...]:
    return Bookmark.parse(place.metadata, place.offset).pending


def _plan_place(connection: Connection, tag: str) -> Place:
    return Place(connection.topic_name(rewarded_topic(tag)), 0)


def _places(connection: Connection, partitions: int) -> list[Place]:
    return [Place(connection.topic_name(STEPS), number) for number in range(partitions)]


def _check_untouched(connection: Connection, tag: str) -> None:
    bounds = read_bounds(connection, rewarded_topic(tag))
    live = read_commits(connection, live_group(tag), _places(connection, len(bounds)))
    if any(bound.end > 0 for bound in bounds.values()) or any(c.offset >= 0 for c in live):
        raise Fatal(
            f"{connection.topic_name(rewarded_topic(tag))} has rewards that no rescoring can go on "
            "with; choose another tag"
        )


# Scoring as it comes


def open_live(connection: Connection, tag: str, group: str, functions: Sequence[Function]) -> None:
    """Makes the tag's topic, or says why these functions cannot go on with it."""
    topic = rewarded_topic(tag)
    if not topics.create_twin(connection, tag):
        bounds = read_bounds(connection, topic)
        _check_functions(connection, topic, bounds, functions)
        places = _places(connection, len(bounds))
        begun = any(c.offset >= 0 for c in read_commits(connection, group, places))
        if not begun and any(bound.end > 0 for bound in bounds.values()):
            _go_on(connection, tag, group)


def _check_functions(
    connection: Connection,
    topic: str,
    bounds: dict[int, PartitionBounds],
    functions: Sequence[Function],
) -> None:
    found = newest_functions(connection, topic, bounds)
    if found is not None and found != sorted(function.described for function in functions):
        raise Fatal(
            f"{connection.topic_name(topic)} is scored by {', '.join(found) or 'nobody'}, and this "
            f"would be {_named(functions) or 'nobody'}; give it another tag"
        )


def newest_functions(
    connection: Connection, topic: str, bounds: dict[int, PartitionBounds]
) -> list[str] | None:
    """Those of the last scored End that is found; None: nothing is scored yet."""
    spans = {
        n: OffsetRange(max(bound.low, bound.end - TAIL), bound.end) for n, bound in bounds.items()
    }
    codec, newest = connection.codec(), None
    with Scan(connection, topic, spans) as scan:
        for message in scan:
            record = received(message, codec).record
            if isinstance(record, TrajectoryEnd) and record.rewards:
                newest = record
    if newest is None:
        return None
    whole = [reward for reward in newest.rewards if reward.step_id is None]
    return sorted(described(reward.name, reward.version, reward.weight) for reward in whole)


def _go_on(connection: Connection, tag: str, group: str) -> None:
    """Takes over where a rescoring has ended, with the trajectories that were open there."""
    [commit] = read_commits(connection, rescore_group(tag), [_plan_place(connection, tag)])
    name = connection.topic_name(rewarded_topic(tag))
    if commit.offset < 0:
        raise Fatal(f"{name} has rewards, and it is not known how far they go; choose another tag")
    plan = msgspec.json.decode(commit.metadata or "", type=Plan)
    if not all(done for _, done in positions(connection, tag, plan)):
        raise Fatal(f"{name} is not scored to its end; run its `steplog replay rescore` first")
    places = read_commits(connection, rescore_group(tag), _places(connection, len(plan.ends)))
    set_commits(connection, group, places)
