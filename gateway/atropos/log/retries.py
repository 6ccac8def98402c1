"""Recognizes posts that repeat one which the log has already.

Stock clients send no idempotency key, and may post equal groups on purpose. So a post is a retry only
if it equals one whose answer was not fully sent, and comes within ten seconds of that:

* a post whose connection was gone when its answer was ready;
* a post that an earlier server wrote, if no later record says that its answer was sent. Every record
  says up to which sequence answers were sent (`settled`), and an event says so when no other record
  follows: so these are the posts of the last moment before the server died. Their ten seconds start
  when the server is ready again, because clients may have waited for it.

Each such post matches one retry. A post whose client left while it was being written is awaited first.
The environment's id is part of the comparison.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

RETRY_WINDOW_S = 10.0
"""A stock client tries three times within three seconds."""


class Delivery:
    """The answer to one posted group. `outcome` is whether it was sent."""

    def __init__(self, fingerprint: bytes, is_gone: Callable[[], bool]) -> None:
        self.fingerprint = fingerprint
        self.is_gone = is_gone
        """Whether the client has left."""
        self.sequence: int | None = None
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class RetryDetector:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: dict[bytes, list[Delivery]] = {}
        self._unsettled: dict[int, Delivery] = {}
        """By sequence: groups whose answers are not known to have been sent."""
        self._unsent: dict[bytes, list[int]] = {}
        """By fingerprint: sequences for which a retry may come."""

    def expect_retries_of(self, groups: Iterable[tuple[int, bytes]]) -> None:
        """Groups of an earlier server whose answers may not have been sent: sequence, fingerprint."""
        for sequence, fingerprint in groups:
            delivery = Delivery(fingerprint, lambda: True)
            delivery.sequence = sequence
            self._unsettled[sequence] = delivery
            self._expect_retry(delivery)

    async def match(
        self, fingerprints: Sequence[bytes], is_gone: Callable[[], bool]
    ) -> list[Delivery]:
        """Returns a delivery for each group of a post, with a sequence if the log has the group."""
        while outcomes := self._abandoned(fingerprints):
            await asyncio.wait(outcomes)
        return [self._new_delivery(fingerprint, is_gone) for fingerprint in fingerprints]

    def _abandoned(self, fingerprints: Iterable[bytes]) -> list["asyncio.Future[bool]"]:
        """Outcomes of equal posts that are still pending and whose clients have left."""
        equal = (d for f in fingerprints for d in self._pending.get(f, ()))
        return [delivery.outcome for delivery in equal if delivery.is_gone()]

    def _new_delivery(self, fingerprint: bytes, is_gone: Callable[[], bool]) -> Delivery:
        delivery = Delivery(fingerprint, is_gone)
        if unsent := self._unsent.get(fingerprint):
            delivery.sequence = unsent[0]
            self._unsettled[delivery.sequence] = delivery
            self._stop_expecting(delivery)
        self._pending.setdefault(fingerprint, []).append(delivery)
        return delivery

    def assign_sequences(self, deliveries: Sequence[Delivery], first: int) -> None:
        """The groups are written under consecutive sequence numbers, starting with `first`."""
        for sequence, delivery in enumerate(deliveries, first):
            delivery.sequence = sequence
            self._unsettled[sequence] = delivery

    def discard(self, deliveries: Sequence[Delivery]) -> None:
        """The groups could not be written."""
        for delivery in deliveries:
            assert delivery.sequence is not None
            del self._unsettled[delivery.sequence]
            delivery.sequence = None

    def settle(self, deliveries: Collection[Delivery], sent: bool) -> None:
        """Records whether the answer to a post was sent."""
        for delivery in deliveries:
            pending = self._pending[delivery.fingerprint]
            pending.remove(delivery)
            if not pending:
                del self._pending[delivery.fingerprint]
            if delivery.sequence is not None and not sent:
                self._expect_retry(delivery)
            elif delivery.sequence is not None:
                del self._unsettled[delivery.sequence]
            delivery.outcome.set_result(sent)

    def settled_up_to(self, newest: int) -> int:
        """The sequence up to which every answer was sent or given up, if `newest` is the newest."""
        return min(self._unsettled) - 1 if self._unsettled else newest

    def _expect_retry(self, delivery: Delivery) -> None:
        assert delivery.sequence is not None
        self._unsent.setdefault(delivery.fingerprint, []).append(delivery.sequence)
        self._loop.call_later(RETRY_WINDOW_S, self._expire, delivery)

    def _expire(self, delivery: Delivery) -> None:
        """No retry came in time. One that has begun meanwhile has its own delivery."""
        assert delivery.sequence is not None
        if self._unsettled.get(delivery.sequence) is not delivery:
            return
        del self._unsettled[delivery.sequence]
        self._stop_expecting(delivery)

    def _stop_expecting(self, delivery: Delivery) -> None:
        """A retry has come, or none is accepted any more."""
        assert delivery.sequence is not None
        unsent = self._unsent[delivery.fingerprint]
        unsent.remove(delivery.sequence)
        if not unsent:
            del self._unsent[delivery.fingerprint]
