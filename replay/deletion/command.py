"""`steplog replay delete`: copies the log to another topic prefix, without the deleted records.

Kafka deletes by age, never a single record. So all topics are copied without the matching records,
every other record at the same offset. Then the copy is searched for anything that should be gone, the
consumer groups' offsets are copied with their bookmarks and, on request, the original is deleted.
Repeating the command continues the copy: run it while the services work, stop them, and run it again.
"""

from collections.abc import Callable, Iterator

from pool import topics
from pool.connection import Connection
from pool.readers.scan import Scan
from pool.topics import DEAD_LETTERS, LEDGER, POLICY
from replay.deletion.criteria import DeletionCriteria, decode_or_none
from replay.deletion.group_offsets import copy_offsets
from replay.deletion.topic_copy import CopyCounts, TopicCopy
from replay.deletion.verification import verify_topic
from replay.offset_ranges import OffsetRanges, stored_ranges
from replay.settings import DeleteSettings
from schemas import Record
from servicekit.command_line import print_line
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress

WITHOUT_TENANTS = (POLICY, LEDGER, DEAD_LETTERS)
"""Topics whose records name no tenant."""


def delete(settings: DeleteSettings, say: Callable[[str], None] = print_line) -> None:
    names = topics.check(settings)
    ranges = {name: stored_ranges(settings, name) for name in names}
    criteria = DeletionCriteria(settings)
    if settings.tenant:
        _find_tenants_trajectories(settings, ranges, criteria)
    if settings.dry_run:
        for name in names:
            count = sum(map(criteria.match, _records(settings, name, ranges[name])))
            say(f"{settings.topic_name(name)}: {count:,} records would be deleted")
        return
    copy = settings.model_copy(update={"topic_prefix": settings.into_prefix})
    topics.create_like(settings, copy)
    for name in names:
        counts = _copy_topic(settings, copy, name, ranges[name], criteria)
        say(f"{copy.topic_name(name)}: {_summary(counts)}")
    checked = sum(verify_topic(copy, name, stored_ranges(copy, name), criteria) for name in names)
    say(f"Verified: none of the {checked:,} records of {copy.topic_prefix}* names deleted data.")
    _check_unchanged(settings, ranges)
    groups = copy_offsets(settings, copy, names)
    say(f"Copied the offsets of {len(groups)} groups{': ' if groups else ''}{', '.join(groups)}.")
    if settings.and_delete_original:
        topics.delete_topics(settings, names)
        say(f"Deleted all topics of {settings.topic_prefix}*.")
    say(f"Start the services with topic_prefix = {copy.topic_prefix}")


def _copy_topic(
    original: Connection,
    copy: Connection,
    topic: str,
    ranges: OffsetRanges,
    criteria: DeletionCriteria,
) -> CopyCounts:
    copied_ends = {number: copied.end for number, copied in stored_ranges(copy, topic).items()}
    counts = TopicCopy(original, copy, topic, ranges, copied_ends, criteria).run()
    # The copy must not keep records that the original has lost to retention.
    topics.delete_records_before(
        copy, topic, {number: stored.first for number, stored in ranges.items()}
    )
    return counts


def _summary(counts: CopyCounts) -> str:
    summary = (
        f"{counts.kept:,} records copied, {counts.removed:,} left out, {counts.filled:,} gaps kept"
    )
    return summary + (f", {counts.scrubbed:,} with names removed" if counts.scrubbed else "")


def _check_unchanged(settings: DeleteSettings, ranges: dict[str, OffsetRanges]) -> None:
    for name, before in ranges.items():
        now = stored_ranges(settings, name)
        if any(now[number].end != stored.end for number, stored in before.items()):
            raise Fatal(
                f"{settings.topic_name(name)} has grown during the copy. Stop all services, then run "
                "the same command again: it copies the rest."
            )


def _find_tenants_trajectories(
    connection: Connection, ranges: dict[str, OffsetRanges], criteria: DeletionCriteria
) -> None:
    for name in ranges:
        if name not in WITHOUT_TENANTS:
            for record in _records(connection, name, ranges[name]):
                criteria.add_trajectory_of_tenant(record)


def _records(connection: Connection, topic: str, ranges: OffsetRanges) -> Iterator[Record]:
    codec = connection.codec()
    with (
        Scan(connection, topic, ranges) as scan,
        show_progress(f"reading {topic}", scan.total) as update,
    ):
        for message in scan:
            value = message.value()
            if value is not None and (record := decode_or_none(codec, value)) is not None:
                yield record
            update(scan.done)
