"""Every error that a service raises on purpose, as one tree.

    SteplogError
    ├── Retryable             the same call may succeed later; nothing was lost or half-written
    │   └── BrokerUnavailable the broker did not acknowledge within the configured time
    ├── Poison                this one record can never be used; it goes to dead-letters
    │   └── RecordTooLarge    refused before it was sent
    └── Fatal                 the process must stop; the message says why
        ├── AccessRefused     a login or certificate was refused, by the broker or by us
        ├── Fenced            another process took over this transactional id or membership
        ├── OffsetLost        retention deleted records that open state still needs
        ├── TooManyPoison     the dead-letter limiter stopped a broken deployment
        └── TopicMismatch     topics are missing or do not fit each other

Exceptions of other libraries are turned into these where the library is called. Bytes that cannot be
decoded raise `schemas.SchemaError`, which readers treat as poison.
"""


class SteplogError(Exception):
    """The root. The message is one sentence for a person, without a traceback."""


class Retryable(SteplogError):
    pass


class BrokerUnavailable(Retryable):
    pass


class Poison(SteplogError):
    pass


class RecordTooLarge(Poison):
    pass


class Fatal(SteplogError):
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
