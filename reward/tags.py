"""Tags: a tag names one way of scoring, with a topic of its own that has each trajectory once.

What a tag stands for is recorded in the log, so it survives every crash:

* Every End in a tag's topic names the functions that scored it. Other functions are refused.
* The plan of a rescoring (its request and its range) is the metadata of a commit of its consumer group
  on the tag's topic, made in one request with the offsets at which reading begins.
* A live worker of the tag begins where a rescoring of it has ended.

Kafka forgets the commits of a group without members after a week (`offsets.retention.minutes`). A
topic that has rewards but no offsets to continue from is refused: it would be filled a second time.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from confluent_kafka import TopicPartition

from pool import topics
from pool.connection import Connection
from pool.consumers.commits import read_commits, set_commits
from pool.core.bookmark import Bookmark
from pool.readers.dataset import LOOK_BACK
from pool.readers.reader import PartitionBounds, read_bounds
from pool.readers.scan import OffsetRange, Scan, decode_message
from pool.readers.selection import SelectionSettings, TopicRanges
from pool.topics import STEPS, rewarded_topic
from reward.scoring.loading import RewardFunction, function_identity
from schemas import TrajectoryEnd
from servicekit.errors import Fatal

TAIL = 1_000
"""Offsets at the end of each partition in which the newest scored End is searched."""
MAX_FUNCTIONS_TEXT = 200
"""Characters of the functions' identities that a plan keeps, for messages."""


def live_group(tag: str | None) -> str:
    return "steplog-reward" if tag is None else f"steplog-reward-{tag}"


def rescore_group(tag: str) -> str:
    return f"steplog-rescore-{tag}"


class RescorePlan(msgspec.Struct, frozen=True):
    """A rescoring: its functions and request, and the offsets of `steps` that it covers, by partition.
    The encoded form is stored in commits: keep it compatible."""

    functions: str
    request_digest: str = msgspec.field(name="asked")
    trajectories: int
    first: list[int]
    ends: list[int]


def make_plan(
    functions: Sequence[RewardFunction],
    selection: SelectionSettings,
    channels: Sequence[str],
    ranges: TopicRanges,
    trajectories: int,
) -> RescorePlan:
    spans = [span for _, span in sorted(ranges.by_partition.items())]
    return RescorePlan(
        _format_functions(functions)[:MAX_FUNCTIONS_TEXT],
        _request_digest(functions, selection, channels),
        trajectories,
        [span.first for span in spans],
        [span.end for span in spans],
    )


def _request_digest(
    functions: Sequence[RewardFunction], selection: SelectionSettings, channels: Sequence[str]
) -> str:
    request = selection.model_dump_json(include=set(SelectionSettings.model_fields))
    text = "\n".join([_format_functions(functions), request, *sorted(channels)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _format_functions(functions: Sequence[RewardFunction]) -> str:
    return ", ".join(function.identity for function in functions)


# Rescoring a range


def find_plan(
    connection: Connection,
    tag: str,
    functions: Sequence[RewardFunction],
    selection: SelectionSettings,
    channels: Sequence[str],
) -> RescorePlan | None:
    """The plan of the tag's rescoring if it has begun, else None. Raises Fatal if the tag is taken."""
    topic = rewarded_topic(tag)
    if topic not in topics.find_topics(connection):
        return None
    [commit] = read_commits(connection, rescore_group(tag), [_plan_partition(connection, tag)])
    if commit.offset < 0:
        _check_untouched(connection, tag)
        return None
    plan = msgspec.json.decode(commit.metadata or "", type=RescorePlan)
    name = connection.topic_name(topic)
    if plan.functions != _format_functions(functions)[:MAX_FUNCTIONS_TEXT]:
        raise Fatal(
            f"{name} is scored by {plan.functions}, but this command would score with "
            f"{_format_functions(functions)}; choose another tag."
        )
    if plan.request_digest != _request_digest(functions, selection, channels):
        raise Fatal(
            f"{name} was begun with another range, filter or --channels; choose another tag."
        )
    return plan


def begin_rescore(connection: Connection, tag: str, plan: RescorePlan, ranges: TopicRanges) -> None:
    """Creates the topic, then records the plan together with the offsets at which reading begins. After
    a crash between the two the topic is empty, and the command may be run again."""
    topics.create_rewarded_topic(connection, tag)
    steps = connection.topic_name(STEPS)
    starts = [
        TopicPartition(steps, number, plan.first[number], Bookmark(span.first).encode())
        for number, span in ranges.extended_back(LOOK_BACK).items()
    ]
    partition = _plan_partition(connection, tag)
    encoded = msgspec.json.encode(plan).decode()
    plan_commit = TopicPartition(partition.topic, partition.partition, 0, encoded)
    set_commits(connection, rescore_group(tag), [*starts, plan_commit])


def positions(connection: Connection, tag: str, plan: RescorePlan) -> list[tuple[int, bool]]:
    """For each partition of `steps`: the committed offset, and whether the partition is done."""
    partitions = _step_partitions(connection, len(plan.ends))
    commits = read_commits(connection, rescore_group(tag), partitions)
    return [
        (commit.offset, commit.offset >= end and not _pending(commit))
        for commit, end in zip(commits, plan.ends, strict=True)
    ]


def _pending(commit: TopicPartition) -> tuple[int, ...]:
    return Bookmark.parse(commit.metadata, commit.offset).pending


def _plan_partition(connection: Connection, tag: str) -> TopicPartition:
    """The partition of the tag's topic on which the plan is committed."""
    return TopicPartition(connection.topic_name(rewarded_topic(tag)), 0)


def _step_partitions(connection: Connection, partitions: int) -> list[TopicPartition]:
    return [TopicPartition(connection.topic_name(STEPS), number) for number in range(partitions)]


def _check_untouched(connection: Connection, tag: str) -> None:
    bounds = read_bounds(connection, rewarded_topic(tag))
    live = read_commits(connection, live_group(tag), _step_partitions(connection, len(bounds)))
    if any(bound.end > 0 for bound in bounds.values()) or any(c.offset >= 0 for c in live):
        raise Fatal(
            f"{connection.topic_name(rewarded_topic(tag))} already has rewards or a live worker, "
            "and no rescoring to continue; choose another tag."
        )


# Scoring live


def open_live(
    connection: Connection, tag: str, group: str, functions: Sequence[RewardFunction]
) -> None:
    """Creates the tag's topic; raises Fatal if it exists and these functions cannot continue it."""
    topic = rewarded_topic(tag)
    if not topics.create_rewarded_topic(connection, tag):
        bounds = read_bounds(connection, topic)
        _check_functions(connection, topic, bounds, functions)
        partitions = _step_partitions(connection, len(bounds))
        has_begun = any(c.offset >= 0 for c in read_commits(connection, group, partitions))
        if not has_begun and any(bound.end > 0 for bound in bounds.values()):
            _continue_rescore(connection, tag, group)


def _check_functions(
    connection: Connection,
    topic: str,
    bounds: dict[int, PartitionBounds],
    functions: Sequence[RewardFunction],
) -> None:
    recorded = newest_functions(connection, topic, bounds)
    if recorded is not None and recorded != sorted(function.identity for function in functions):
        raise Fatal(
            f"{connection.topic_name(topic)} is scored by {', '.join(recorded) or 'no function'}, but "
            f"this worker would score with {_format_functions(functions) or 'no function'}; "
            "choose another tag."
        )


def newest_functions(
    connection: Connection, topic: str, bounds: dict[int, PartitionBounds]
) -> list[str] | None:
    """Identities of the functions in the newest scored End; None if nothing is scored yet."""
    spans = {
        n: OffsetRange(max(bound.low, bound.end - TAIL), bound.end) for n, bound in bounds.items()
    }
    codec, newest = connection.codec(), None
    with Scan(connection, topic, spans) as scan:
        for message in scan:
            record = decode_message(message, codec).record
            if isinstance(record, TrajectoryEnd) and record.rewards:
                newest = record
    if newest is None:
        return None
    of_trajectory = [reward for reward in newest.rewards if reward.step_id is None]
    return sorted(function_identity(r.name, r.version, r.weight) for r in of_trajectory)


def _continue_rescore(connection: Connection, tag: str, group: str) -> None:
    """Copies the offsets at which a rescoring has ended, with the trajectories that were open there."""
    [commit] = read_commits(connection, rescore_group(tag), [_plan_partition(connection, tag)])
    name = connection.topic_name(rewarded_topic(tag))
    if commit.offset < 0:
        raise Fatal(f"{name} has rewards, but no offsets to continue from; choose another tag.")
    plan = msgspec.json.decode(commit.metadata or "", type=RescorePlan)
    if not all(is_done for _, is_done in positions(connection, tag, plan)):
        raise Fatal(
            f"The rescoring into {name} is not finished; run `steplog replay rescore` first."
        )
    partitions = read_commits(
        connection, rescore_group(tag), _step_partitions(connection, len(plan.ends))
    )
    set_commits(connection, group, partitions)
