"""`steplog cat`: the records of a topic as JSON lines.

One line per record: its type, partition, offset, timestamp and key, then the fields of its schema, with
full prompts. Records that cannot be decoded are printed as hexadecimal bytes, with the reason.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiokafka import ConsumerRecord
from pydantic import Field, ValidationInfo, field_validator

from pool.connection import Connection
from pool.core.prompts import BrokenPrompt
from pool.readers.prompt_history import PromptHistory, open_prompt_history
from pool.readers.reader import TopicReader, open_topic
from pool.readers.selection import parse_offset_or_time
from pool.topics import TOPICS, spec_of
from schemas import Codec, Record, SchemaError, Step
from schemas.packing import unpack_ids
from schemas.plain import to_plain
from servicekit.command_line import print_line
from servicekit.errors import SteplogError
from steplog.settings import POSITIONAL


class CatSettings(Connection):
    """The settings of `steplog cat`."""

    topic: str = Field(description=f"one of {', '.join(TOPICS)}", json_schema_extra=POSITIONAL)
    from_: int | datetime | None = Field(
        None, description="first offset in every partition, or a time such as 2030-01-31T12:00:00Z"
    )
    key: str | None = Field(None, description="only records with this key, such as a prompt_uid")
    limit: int | None = Field(None, ge=0, description="stop after this many records")
    follow: bool = Field(False, description="wait for new records at the end")
    tokenizer: str | None = Field(
        None, description="folder of a tokenizer, to print prompts and responses as text too"
    )

    @field_validator("topic")
    @classmethod
    def _check_topic(cls, topic: str, info: ValidationInfo) -> str:
        """Accept a name with or without the topic prefix."""
        name = topic.removeprefix(info.data.get("topic_prefix", ""))
        if spec_of(name) is None:
            raise ValueError(f"there is no topic {topic!r}; choose one of {', '.join(TOPICS)}")
        return name

    @field_validator("from_", mode="before")
    @classmethod
    def _parse_start(cls, start: object) -> object:
        return parse_offset_or_time(start)


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int]) -> Any: ...


def cat(settings: CatSettings, say: Callable[[str], None] = print_line) -> None:
    """Print one line per record, up to the end of the topic or, with `--follow`, without end."""
    tokenizer = load_tokenizer(settings.tokenizer) if settings.tokenizer else None
    asyncio.run(_cat(settings, tokenizer, say))


async def _cat(
    settings: CatSettings, tokenizer: Tokenizer | None, say: Callable[[str], None]
) -> None:
    codec = settings.codec()
    async with (
        open_topic(settings, settings.topic) as reader,
        open_prompt_history(settings, settings.topic, codec) as history,
    ):
        printed = 0
        messages = _read_messages(settings, reader)
        # The limit is checked before waiting for the next record, which may never come.
        while printed != settings.limit and (message := await anext(messages, None)):
            line = await _format_message(message, codec, history, tokenizer)
            say(msgspec.json.encode(line).decode())
            printed += 1


async def _read_messages(
    settings: CatSettings, reader: TopicReader
) -> AsyncIterator[ConsumerRecord]:
    partitions = list(reader.partitions)
    if settings.key is not None:
        partitions = [reader.partition_of(settings.key)]
    bounds = await reader.bounds(partitions)
    starts = {number: bounds[number].low for number in partitions}
    if isinstance(settings.from_, datetime):
        starts = await reader.offsets_at(settings.from_, partitions)
    elif settings.from_ is not None:
        first = settings.from_
        starts = {n: min(max(first, b.low), b.end) for n, b in bounds.items()}
    ends = None if settings.follow else {number: bounds[number].end for number in partitions}
    async for message in reader.read(starts, ends):
        if settings.key is None or message.key == settings.key.encode():
            yield message


async def _format_message(
    message: ConsumerRecord, codec: Codec, history: PromptHistory, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    position = {
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": datetime.fromtimestamp(message.timestamp / 1000, UTC).isoformat(),
        "key": _text(message.key),
    }
    if message.headers:
        position["headers"] = {name: _text(value) for name, value in message.headers}
    if message.value is None:
        return {"type": "tombstone", **position}
    try:
        record = codec.decode(message.value)
    except SchemaError as error:
        return {
            "type": "undecodable",
            **position,
            "reason": str(error),
            "value": message.value.hex(),
        }
    fields = await _fields(record, message, history, tokenizer)
    return {"type": type(record).__name__, **position, **fields}


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


async def _fields(
    record: Record, message: ConsumerRecord, history: PromptHistory, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    fields = to_plain(record)
    if isinstance(record, Step):
        try:
            prompt = await history.prompt(record, message.partition, message.offset)
            fields["prompt_ids"] = unpack_ids(prompt).tolist()
        except BrokenPrompt as broken:
            fields["prompt_ids"] = None
            fields["problem"] = str(broken)
        if tokenizer is not None:
            fields["prompt_text"] = _decode(tokenizer, fields["prompt_ids"])
            fields["response_text"] = _decode(tokenizer, fields["response_ids"])
    return fields


def _decode(tokenizer: Tokenizer, ids: list[int] | None) -> Any:
    # Tokenizers refuse negative ids, which no token has.
    return None if ids is None else tokenizer.decode([number for number in ids if number >= 0])


class TokenizerError(SteplogError):
    """The folder holds no tokenizer that transformers can load."""


def load_tokenizer(folder: str) -> Tokenizer:
    if not Path(folder).is_dir():  # transformers would look for a model of that name on the network
        raise TokenizerError(
            f"{folder} is not a folder. --tokenizer must be the folder of a tokenizer."
        )
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from servicekit.tokenizer import hide_torch

    hide_torch()
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # Broken files make the loader raise arbitrary exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"No tokenizer could be loaded from {folder}: {reason}") from error
    return tokenizer
