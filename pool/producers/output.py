"""What every producer has in common: the encoded record that it takes, and its client's options."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pool.connection import MAX_RECORD_BYTES, Connection

Headers = Sequence[tuple[str, bytes]]


class Output(NamedTuple):
    """A value for a topic, as a Kafka client takes it."""

    topic: str
    key: str | bytes | None
    value: bytes | None
    headers: Headers = ()


def producer_options(connection: Connection, linger_ms: int = 2, **options: Any) -> dict[str, Any]:
    """What every producer of ours has in common."""
    return connection.confluent(
        linger_ms=linger_ms,
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        # librdkafka's own default spreads keys unlike every other client and would split groups.
        partitioner="murmur2_random",
        # The broker compares the compressed batch, we compare the record: ours is the stricter one.
        message_max_bytes=2 * MAX_RECORD_BYTES,
        # A topic that is missing is reported after this long; ours exist before anybody writes.
        topic_metadata_propagation_max_ms=5_000,
        batch_size=1024 * 1024,
        **options,
    )
