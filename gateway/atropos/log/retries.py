"""Which posts are retries of one that we have already.

Stock clients send no key, and may post equal groups on purpose. So a post is a retry only if it equals
one whose answer was not fully sent, and comes within ten seconds of that:

* A post whose connection was gone when its answer was ready.
* A post that the log has from an earlier life of the server, and of which no later record says that
  its answer was sent. Every record says up to where answers were (`settled`), and when no other one
  follows, an event says it: so these are the posts of the last moment before the server died. Their
  ten seconds begin when the server is ready again, since clients may have waited for it.

Each such post stands for one retry. One whose client is gone while it is still being written is waited
for. The environment's id is part of what is compared.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

PATIENCE = 10.0
"""Seconds. A stock client tries three times within three."""


class Delivery:
    """The answer to one group that was posted. `outcome` is whether it was sent."""

    def __init__(self, fingerprint: bytes, is_gone: Callable[[], bool]) -> None:
        self.fingerprint = fingerprint
        self.is_gone = is_gone
        """Whether the client is."""
        self.sequence: int | None = None
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class Retries:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[bytes, list[Delivery]] = {}
        self._unsettled: dict[int, Delivery] = {}
        """By sequence: in the log, and not known to be answered."""
        self._unsent: dict[bytes, list[int]] = {}
        """Sequences that a retry may come for."""

    def begin(self, unknown: Iterable[tuple[int, bytes]]) -> None:
        """Groups of an earlier life whose answers may not have been sent."""
        for sequence, fingerprint in unknown:
            delivery = Delivery(fingerprint, lambda: True)
            delivery.sequence = sequence
            self._unsettled[sequence] = delivery
            self._leave_open(delivery)

    async def recognise(
        self, fingerprints: Sequence[bytes], is_gone: Callable[[], bool]
    ) -> list[Delivery]:
        """For each group of a post: its delivery, with a sequence if the log has the group."""
        while running := self._abandoned(fingerprints):
            await asyncio.wait(running)
        return [self._deliver(fingerprint, is_gone) for fingerprint in fingerprints]

    def _abandoned(self, fingerprints: Iterable[bytes]) -> list["asyncio.Future[bool]"]:
        """Equal posts that are under way, and whose clients are gone."""
        equal = (d for f in fingerprints for d in self._under_way.get(f, ()))
        return [delivery.outcome for delivery in equal if delivery.is_gone()]

    def _deliver(self, fingerprint: bytes, is_gone: Callable[[], bool]) -> Delivery:
        delivery = Delivery(fingerprint, is_gone)
        if unsent := self._unsent.get(fingerprint):
            delivery.sequence = unsent[0]
            self._unsettled[delivery.sequence] = delivery
            self._expect_no_more(delivery)
        self._under_way.setdefault(fingerprint, []).append(delivery)
        return delivery

    def number(self, deliveries: Sequence[Delivery], first: int) -> None:
        """The groups are written under the numbers from the first one on."""
        for sequence, delivery in enumerate(deliveries, first):
            delivery.sequence = sequence
            self._unsettled[sequence] = delivery

    def forget(self, deliveries: Sequence[Delivery]) -> None:
        """The log did not take the groups."""
        for delivery in deliveries:
            assert delivery.sequence is not None
            del self._unsettled[delivery.sequence]
            delivery.sequence = None

    def settle(self, deliveries: Collection[Delivery], sent: bool) -> None:
        """The post was answered, or its client was gone."""
        for delivery in deliveries:
            running = self._under_way[delivery.fingerprint]
            running.remove(delivery)
            if not running:
                del self._under_way[delivery.fingerprint]
            if delivery.sequence is not None and not sent:
                self._leave_open(delivery)
            elif delivery.sequence is not None:
                del self._unsettled[delivery.sequence]
            delivery.outcome.set_result(sent)

    def settled(self, last: int) -> int:
        """Up to which sequence all is settled, when `last` is the newest."""
        return min(self._unsettled) - 1 if self._unsettled else last

    def _leave_open(self, delivery: Delivery) -> None:
        assert delivery.sequence is not None
        self._unsent.setdefault(delivery.fingerprint, []).append(delivery.sequence)
        self._loop.call_later(PATIENCE, self._give_up, delivery)

    def _give_up(self, delivery: Delivery) -> None:
        """Nobody came for it; a retry that has begun meanwhile has a delivery of its own."""
        assert delivery.sequence is not None
        if self._unsettled.get(delivery.sequence) is not delivery:
            return
        del self._unsettled[delivery.sequence]
        self._expect_no_more(delivery)

    def _expect_no_more(self, delivery: Delivery) -> None:
        """No retry comes for the group any more, or one has come."""
        assert delivery.sequence is not None
        unsent = self._unsent[delivery.fingerprint]
        unsent.remove(delivery.sequence)
        if not unsent:
            del self._unsent[delivery.fingerprint]
