"""How many groups run at the same time.

More groups keep the engines busy, up to the point where they only slow each other down and their
data waits and gets stale. Nobody tells an environment where that point is, and it moves. So the
limit is found by probing, as TCP does for a network:

* it starts low and grows by one with every finished group, which doubles it each round;
* when the answers of a round take twice as long per token as those of the fastest round, the limit is
  cut to three quarters, and from then on grows by one per round;
* it does not grow in a round in which the gateway made a group wait. It is not cut either: only one
  group asks for admission at a time, and waiting costs nothing; when the trainer has decided, its
  engines should have work at once.

A round is as many groups as the limit allows, so that the effect of a cut shows before the next one.
Running groups are never stopped: a lower limit only lets fewer start.
"""

from statistics import median

SLOWDOWN = 2.0
"""Seconds per token, relative to the fastest round, at which the engines count as full."""
CUT_TO = 0.75
FORGET = 1.001
"""The fastest round counts a little less with each round: contexts grow, and engines change."""
FIRST_LIMIT = 2.0


class Concurrency:
    def __init__(self, highest: int) -> None:
        self._highest = highest
        self._limit = min(FIRST_LIMIT, highest)
        self._was_cut = False
        self._fastest: float | None = None
        self._seconds_per_token: list[float] = []
        self._groups_to_go = self.limit
        """Groups until the round is over."""
        self._had_to_wait = False

    @property
    def limit(self) -> int:
        return int(self._limit)

    def record_group(self, seconds_per_token: float | None, had_to_wait: bool) -> None:
        """A group has finished. `had_to_wait`: the gateway did not admit it at once."""
        self._groups_to_go -= 1
        self._had_to_wait |= had_to_wait
        if seconds_per_token is not None:
            self._seconds_per_token.append(seconds_per_token)
        if not self._was_cut and not self._had_to_wait:
            self._grow()
        if not self._groups_to_go:
            self._end_round()

    def _end_round(self) -> None:
        speed = median(self._seconds_per_token) if self._seconds_per_token else None
        if speed is not None and self._fastest is not None and speed > SLOWDOWN * self._fastest:
            self._limit = max(1.0, self._limit * CUT_TO)
            self._was_cut = True
        elif self._was_cut and not self._had_to_wait:
            self._grow()
        if speed is not None:
            earlier = speed if self._fastest is None else self._fastest * FORGET
            self._fastest = min(speed, earlier)
        self._groups_to_go, self._seconds_per_token, self._had_to_wait = self.limit, [], False

    def _grow(self) -> None:
        self._limit = min(self._highest, self._limit + 1)
