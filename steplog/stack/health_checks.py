"""Health checks of parts: which of them answer, and which have stopped answering.

A part that has never answered may take as long as it likes to load. A part counts as hung only after a
number of failed checks as well as a time: if the supervisor itself was suspended, there were no checks.
"""

import http.client
import time
import urllib.error
import urllib.request

ANSWER_LIMIT = 2.0
"""Seconds in which a part must answer a check."""
CHECK_EVERY = 5.0
"""Seconds between checks of a part that has answered."""
FAILED_CHECKS = 3
"""Checks that must fail in a row before a part counts as hung."""


class HealthChecks:
    """The results of the checks, by the name of the part."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._every = min(CHECK_EVERY, hang_s / FAILED_CHECKS)
        self._checked_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._have_answered: set[str] = set()

    def reset(self, name: str) -> None:
        """The part was restarted."""
        self._have_answered.discard(name)

    def is_due(self, name: str, is_starting: bool) -> bool:
        """Whether to check it now. A part that is starting is checked every time."""
        now = time.monotonic()
        if not is_starting and now - self._checked_at.get(name, 0.0) < self._every:
            return False
        self._checked_at[name] = now
        return True

    def record_answer(self, name: str) -> None:
        self._have_answered.add(name)
        self._failures[name] = 0

    def has_answered(self, name: str) -> bool:
        return name in self._have_answered

    def record_failure(self, name: str, silent_since: float) -> bool:
        """Whether the part hangs; `silent_since` is the time of its first failed check."""
        self._failures[name] = self._failures.get(name, 0) + 1
        is_late = time.time() - silent_since >= self._hang_s
        return self._failures[name] >= FAILED_CHECKS and is_late


def get_status(url: str) -> int | None:
    """The status code of the response; None if there is no response."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_LIMIT) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, http.client.HTTPException, ValueError):
        return None
