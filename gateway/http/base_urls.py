"""Base URLs as people configure them, and the one form that the routes have.

    /TRAJECTORY_UID/PROMPT_UID/v1/ROUTE    a call of a trajectory
    /v1/ROUTE                              a call without one

OpenAI's clients expect a base URL with /v1 and Anthropic's append it themselves, so /v1 is often
missing or doubled, and a trailing slash becomes an empty segment. All of these are unambiguous and are
served. Any other base URL is answered with the right one: a guess would record the call elsewhere.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

API = "v1"
PLACEHOLDERS = ("TRAJECTORY_UID", "PROMPT_UID")
"""What a suggested URL has where the client's URL has nothing."""
MODELS = "models/"
"""Begins the only routes with a parameter after the base URL. A model's name may contain slashes."""


class SplitPath(NamedTuple):
    """A request's path, split where its route begins."""

    base: Sequence[str]
    route: str

    def canonical(self) -> str | None:
        """The path as the routes have it; None if the base URL is wrong."""
        uids = list(self.base)
        while uids and uids[-1] in (API, ""):
            uids.pop()
        if not uids and API in self.base:
            return f"/{API}/{self.route}"
        if len(uids) == 2 and all(uids) and uids[0] != API:
            return f"/{uids[0]}/{uids[1]}/{API}/{self.route}"
        return None

    def suggestion(self) -> str:
        """The path that was probably meant."""
        uids = [name for name in self.base if name not in (API, "")][:2]
        uids += PLACEHOLDERS[len(uids) :]
        return f"/{uids[0]}/{uids[1]}/{API}/{self.route}"


def split_path(path: str, routes: Collection[str]) -> SplitPath | None:
    """Splits before the longest of the routes that the path ends with: /a/chat/completions is a chat of
    nothing but `a`, not a completion of the prompt `chat`. None if it ends with no route."""
    segments = path.rstrip("/").split("/")[1:]
    for at in range(len(segments)):
        split = SplitPath(segments[:at], "/".join(segments[at:]))
        if split.route in routes or (split.route.startswith(MODELS) and split.canonical()):
            return split
    return None


def canonical_path(path: str, routes: Collection[str]) -> str:
    """The path as the routes have it. One whose base URL is wrong is returned as it is."""
    split = split_path(path, routes)
    if split is None:
        return path.rstrip("/") or "/"
    return split.canonical() or path
