"""What all producers share: the encoded messages that they write, and their client options."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pool.connection import MAX_RECORD_BYTES, Connection

Headers = Sequence[tuple[str, bytes]]


class Output(NamedTuple):
    """A message to be written: the arguments of a Kafka client's produce call."""

    topic: str
    key: str | bytes | None
    value: bytes | None
    headers: Headers = ()


def producer_options(connection: Connection, linger_ms: int = 2, **options: Any) -> dict[str, Any]:
    """The client options that all producers of this project share."""
    return connection.confluent(
        linger_ms=linger_ms,
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        # librdkafka's default partitions keys unlike every other client and would split groups.
        partitioner="murmur2_random",
        # We limit the record itself, which is stricter than the limit on a compressed batch.
        message_max_bytes=2 * MAX_RECORD_BYTES,
        # A missing topic is reported after this long; ours exist before anything is written.
        topic_metadata_propagation_max_ms=5_000,
        batch_size=1024 * 1024,
        **options,
    )
