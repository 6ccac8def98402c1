"""Everything that can go wrong with the log, as one tree.

    PoolError
    ├── Retryable             the same call may succeed later; nothing was lost or half-written
    │   └── BrokerUnavailable the broker did not acknowledge in the configured time
    ├── Poison                this one record can never be used; it goes to dead-letters
    │   └── RecordTooLarge    refused before it was sent
    └── Fatal                 the process must stop and say why
        ├── AccessRefused     the login or a certificate is refused, by the broker or by us
        ├── Fenced            another process took over this transactional id or membership
        ├── OffsetLost        retention deleted records that open state still needs
        ├── TooManyPoison     the dead-letter limiter stopped a broken deployment
        └── TopicMismatch     topics are missing or do not fit each other

Third-party exceptions are turned into these at the edge, where a Kafka client is called. Bytes that
cannot be decoded raise `schemas.SchemaError`, which readers treat as poison.
"""


class PoolError(Exception):
    """Something of the log went wrong; the message is one sentence for a person."""


class Retryable(PoolError):
    pass


class BrokerUnavailable(Retryable):
    pass


class Poison(PoolError):
    pass


class RecordTooLarge(Poison):
    pass


class Fatal(PoolError):
    pass


class AccessRefused(Fatal):
    pass


class Fenced(Fatal):
    pass


class OffsetLost(Fatal):
    pass


class TooManyPoison(Fatal):
    pass


class TopicMismatch(Fatal):
    pass
