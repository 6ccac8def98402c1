"""`steplog topics`: create, list and check the topics of the log."""

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
    """The settings of `steplog topics`."""

    partitions: int = Field(
        topics.PARTITIONS,
        ge=1,
        description="partitions of steps and rewarded, when they are created; fixed afterwards",
    )
    replication: int = Field(1, ge=1, description="replication factor of topics that are created")
    json_: bool = Field(False, description="print JSON lines instead of a table")


def create(settings: TopicsSettings, say: Callable[[str], None] = print_line) -> None:
    """Create missing topics, and register the schemas if there is a registry."""
    for name in topics.create(settings, settings.partitions, settings.replication):
        say(f"created {name}")
    if settings.registry_url:
        registry = SchemaRegistry(settings.registry_url)
        for name, topic in TOPICS.items():
            for record_type in topic.records:
                registry.register(settings.topic_name(name), record_type)
                say(f"registered {record_type.__name__} for {settings.topic_name(name)}")
    say(f"All topics exist and match at {settings.bootstrap}.")


def check(settings: TopicsSettings, say: Callable[[str], None] = print_line) -> None:
    topics.check(settings)
    say(f"All topics exist and match at {settings.bootstrap}.")


class TopicRow(NamedTuple):
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
    say(COLUMNS.format(*TopicRow._fields))
    for row in rows:
        counts = (row.partitions or "missing", row.replication or "-")
        say(COLUMNS.format(row.topic, *counts, row.cleanup, ", ".join(row.records) or "any"))


def _rows(settings: TopicsSettings) -> list[TopicRow]:
    layouts = topics.find_topics(settings)
    tagged = {name: TOPICS[REWARDED] for name in sorted(layouts) if name not in TOPICS}
    return [
        _row(settings.topic_name(name), spec, layouts.get(name))
        for name, spec in {**TOPICS, **tagged}.items()
    ]


def _row(name: str, spec: TopicSpec, layout: TopicLayout | None) -> TopicRow:
    partitions, replication = layout or (None, None)
    records = [record_type.__name__ for record_type in spec.records]
    return TopicRow(name, partitions, replication, spec.cleanup, records)
