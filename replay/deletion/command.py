"""`steplog replay delete`: the log goes on under another prefix, without what must go.

Kafka deletes by age, never a single record. So all topics are copied without what must go, each other
record at the offset that it had; the copy is searched; the groups' offsets are copied with their
bookmarks; and when it is asked for, the original is deleted. The same command again goes on where it
was: copy while the services work, stop them, and copy the rest.
"""

from collections.abc import Callable, Iterator

from pool import topics
from pool.connection import Connection
from pool.readers.scan import Scan
from pool.topics import DEAD_LETTERS, LEDGER, POLICY
from replay.deletion.criteria import Forbidden, decoded
from replay.deletion.group_offsets import copy_offsets
from replay.deletion.topic_copy import Copied, Copy
from replay.deletion.verification import prove
from replay.offset_ranges import OffsetRanges, stored_ranges
from replay.settings import DeleteSettings
from schemas import Record
from servicekit.command_line import print_line
from servicekit.errors import Fatal
from servicekit.progress_bar import show_progress

WITHOUT_TENANTS = (POLICY, LEDGER, DEAD_LETTERS)


def delete(settings: DeleteSettings, say: Callable[[str], None] = print_line) -> None:
    found = topics.check(settings)
    spans = {name: stored_ranges(settings, name) for name in found}
    forbidden = Forbidden(settings)
    if settings.tenant:
        learn(settings, spans, forbidden)
    if settings.dry_run:
        for name in found:
            gone = sum(map(forbidden.has, records(settings, name, spans[name])))
            say(f"{settings.topic_name(name)}: {gone:,} records would go")
        return
    copy = settings.model_copy(update={"topic_prefix": settings.into_prefix})
    topics.create_like(settings, copy)
    for name in found:
        done = copy_topic(settings, copy, name, spans[name], forbidden)
        say(f"{copy.topic_name(name)}: {_told(done)}")
    looked = sum(prove(copy, name, stored_ranges(copy, name), forbidden) for name in found)
    say(f"proven: none of the {looked:,} records of {copy.topic_prefix}* names what must go")
    _check_unchanged(settings, spans)
    moved = copy_offsets(settings, copy, found)
    say(f"offsets of {len(moved)} groups copied{': ' if moved else ''}{', '.join(moved)}")
    if settings.and_delete_original:
        topics.delete_topics(settings, found)
        say(f"deleted all topics of {settings.topic_prefix}*")
    say(f"start the services with topic_prefix = {copy.topic_prefix}")


def copy_topic(
    original: Connection, copy: Connection, topic: str, spans: OffsetRanges, forbidden: Forbidden
) -> Copied:
    begun = {number: span.end for number, span in stored_ranges(copy, topic).items()}
    done = Copy(original, copy, topic, spans, begun, forbidden).run()
    # What the original no longer holds, the copy must not hold either.
    topics.delete_records_before(
        copy, topic, {number: span.first for number, span in spans.items()}
    )
    return done


def _told(done: Copied) -> str:
    told = f"{done.kept:,} records copied, {done.removed:,} left out, {done.filled:,} gaps kept"
    return told + (f", {done.scrubbed:,} without the names" if done.scrubbed else "")


def _check_unchanged(settings: DeleteSettings, spans: dict[str, OffsetRanges]) -> None:
    for name, before in spans.items():
        now = stored_ranges(settings, name)
        if any(now[number].end != span.end for number, span in before.items()):
            raise Fatal(
                f"{settings.topic_name(name)} has grown meanwhile; stop all services, and give the "
                "same command again: it copies the rest"
            )


def learn(connection: Connection, spans: dict[str, OffsetRanges], forbidden: Forbidden) -> None:
    """Reads which trajectories are the tenant's."""
    for name in spans:
        if name not in WITHOUT_TENANTS:
            for record in records(connection, name, spans[name]):
                forbidden.learn(record)


def records(connection: Connection, topic: str, spans: OffsetRanges) -> Iterator[Record]:
    codec = connection.codec()
    with (
        Scan(connection, topic, spans) as scan,
        show_progress(f"reading {topic}", scan.total) as moved,
    ):
        for message in scan:
            value = message.value()
            if value is not None and (record := decoded(codec, value)) is not None:
                yield record
            moved(scan.done)
