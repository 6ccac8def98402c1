"""`steplog topics`: make, show and check the topics of the log."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from pydantic import Field

from pool import topics
from pool.connection import Connection
from pool.topics import REWARDED, TOPICS, TopicLayout, TopicSpec
from schemas.registry import SchemaRegistry
from servicekit.command_line import print_line

COLUMNS = "{:<28} {:>10} {:>11}  {:<15} {}"


class TopicsSettings(Connection):
    """What new topics look like."""

    partitions: int = Field(
        topics.PARTITIONS, ge=1, description="of steps and rewarded, for ever; for new topics only"
    )
    replication: int = Field(1, ge=1, description="copies of every record; for new topics only")
    json_: bool = Field(False, description="print JSON lines instead of a table")


def create(settings: TopicsSettings, say: Callable[[str], None] = print_line) -> None:
    """Makes what is missing, and registers the schemas where there is a registry."""
    for name in topics.create(settings, settings.partitions, settings.replication):
        say(f"created {name}")
    if settings.registry_url:
        registry = SchemaRegistry(settings.registry_url)
        for name, topic in TOPICS.items():
            for record_type in topic.records:
                registry.register(settings.topic_name(name), record_type)
                say(f"registered {record_type.__name__} for {settings.topic_name(name)}")
    say(f"all topics are there and fit: {settings.bootstrap}")


def check(settings: TopicsSettings, say: Callable[[str], None] = print_line) -> None:
    topics.check(settings)
    say(f"all topics are there and fit: {settings.bootstrap}")


class Row(NamedTuple):
    topic: str
    partitions: int | None
    replication: int | None
    cleanup: str
    records: list[str]


def show(settings: TopicsSettings, say: Callable[[str], None] = print_line) -> None:
    rows = _rows(settings)
    if settings.json_:
        for row in rows:
            say(msgspec.json.encode(row._asdict()).decode())
        return
    say(COLUMNS.format(*Row._fields))
    for row in rows:
        counts = (row.partitions or "missing", row.replication or "-")
        say(
            COLUMNS.format(
                row.topic, *counts, row.cleanup, ", ".join(row.records) or "any, as it was"
            )
        )


def _rows(settings: TopicsSettings) -> list[Row]:
    found = topics.find_topics(settings)
    tagged = {name: TOPICS[REWARDED] for name in sorted(found) if name not in TOPICS}
    return [
        _row(settings.topic_name(name), topic, found.get(name))
        for name, topic in {**TOPICS, **tagged}.items()
    ]


def _row(name: str, topic: TopicSpec, found: TopicLayout | None) -> Row:
    partitions, replication = found or (None, None)
    records = [record_type.__name__ for record_type in topic.records]
    return Row(name, partitions, replication, topic.cleanup, records)
