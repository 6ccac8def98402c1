"""Which parts answer, and which of those that once did hang.

A part that has never answered may be loading for as long as it likes. Silence is counted in questions
as well as in time: when we stood still ourselves, nobody was asked meanwhile.
"""

import http.client
import time
import urllib.error
import urllib.request

ANSWER_LIMIT = 2.0
"""Seconds that a part has to say how it is."""
ASK_EVERY = 5.0
"""Seconds between two questions to a part that has answered."""
MISSES = 3
"""Questions that must go unanswered before a part counts as hung."""


class Silence:
    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._every = min(ASK_EVERY, hang_s / MISSES)
        self._asked: dict[str, float] = {}
        self._missed: dict[str, int] = {}
        self._have_answered: set[str] = set()

    def begin(self, name: str) -> None:
        """It was started anew."""
        self._have_answered.discard(name)

    def is_time(self, name: str, is_starting: bool) -> bool:
        """To ask. One that starts is asked at every look."""
        now = time.monotonic()
        if not is_starting and now - self._asked.get(name, 0.0) < self._every:
            return False
        self._asked[name] = now
        return True

    def hear(self, name: str) -> None:
        self._have_answered.add(name)
        self._missed[name] = 0

    def has_answered(self, name: str) -> bool:
        return name in self._have_answered

    def miss(self, name: str, since: float) -> bool:
        """Whether it hangs; `since` is when it fell silent."""
        self._missed[name] = self._missed.get(name, 0) + 1
        return self._missed[name] >= MISSES and time.time() - since >= self._hang_s


def answer(url: str) -> int | None:
    """The status of the reply; None when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_LIMIT) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, http.client.HTTPException, ValueError):
        return None
