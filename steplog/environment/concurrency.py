"""How many groups are under way at the same time.

More groups fill the engines, until they only make each other slower, and what they generate waits and
gets stale. Nobody tells an environment where that point is, and it moves. So it is felt for, the way
TCP feels for a network's:

* it begins with few, and adds one with every group that ends: twice as many each round;
* when a round's answers take twice as long per token as the quickest round's, the number is cut to
  three quarters, and from then on grows by one a round;
* it does not grow in a round in which the gateway told a group to wait. It is not cut either: one group
  asks at a time, and waits without costing anything; when the trainer has decided, its engines should
  find work at once.

A round is as many groups as are under way, so that a cut is felt before the next. What runs is never
stopped: a smaller number only lets fewer begin.
"""

from statistics import median

SLOWER = 2.0
"""Times the quickest round's seconds per token: the engines are full."""
KEPT = 0.75
FORGET = 1.001
"""The quickest round counts a little less with each one: contexts grow, and engines change."""
FIRST = 2.0


class Concurrency:
    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = min(FIRST, most)
        self._was_cut = False
        self._quickest: float | None = None
        self._paces: list[float] = []
        self._left = self.limit
        """Groups until the round is over."""
        self._refused = False

    @property
    def limit(self) -> int:
        return int(self._limit)

    def ended(self, pace: float | None, refused: bool) -> None:
        """A group has ended: its seconds per token, and whether it had to wait to begin."""
        self._left -= 1
        self._refused |= refused
        if pace is not None:
            self._paces.append(pace)
        if not self._was_cut and not self._refused:
            self._grow()
        if not self._left:
            self._end_round()

    def _end_round(self) -> None:
        pace = median(self._paces) if self._paces else None
        if pace is not None and self._quickest is not None and pace > SLOWER * self._quickest:
            self._limit = max(1.0, self._limit * KEPT)
            self._was_cut = True
        elif self._was_cut and not self._refused:
            self._grow()
        if pace is not None:
            known = pace if self._quickest is None else self._quickest * FORGET
            self._quickest = min(pace, known)
        self._left, self._paces, self._refused = self.limit, [], False

    def _grow(self) -> None:
        self._limit = min(self._most, self._limit + 1)
