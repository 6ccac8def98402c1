"""Which versions of the weights answered the calls of an evaluation.

The gateway names them in every answer: `1.5`, or `1.5,1.6` if the weights changed meanwhile. Engines
hold only the newest version, so an evaluation beside training may meet several.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steplog.environment.rollouts.group import Group


def count_calls(groups: Iterable[Group[Any]]) -> dict[str, int]:
    """Calls by the version that answered; a call that several answered counts for each."""
    calls = (call for group in groups for rollout in group.rollouts for call in rollout.calls)
    counts = Counter(version for call in calls for version in call.versions)
    return {version: counts[version] for version in sorted(counts, key=order)}


def is_unknown(group: Group[Any]) -> bool:
    """Whether the answers of a usable rollout do not say which weights gave them."""
    usable = [rollout for rollout in group.rollouts if rollout.is_usable]
    return any(not call.versions for rollout in usable for call in rollout.calls) or not all(
        rollout.calls for rollout in usable
    )


def find_outdated(groups: Sequence[Group[Any]]) -> list[Group[Any]]:
    """The groups in which an older version than the newest one answered."""
    newest = max(count_calls(groups), key=order, default="")
    return [group for group in groups if count_calls([group]).keys() - {newest}]


def metrics(calls: Mapping[str, int]) -> dict[str, float]:
    """How many versions answered, and the oldest and newest of a trainer's."""
    if not calls:
        return {}
    numbers = [number for _, number in map(order, calls) if number >= 0]
    row = {"versions": float(len(calls))}
    if numbers:
        row |= {"oldest_version": float(min(numbers)), "newest_version": float(max(numbers))}
    return row


def describe(calls: Mapping[str, int]) -> str:
    """A sentence for the person who reads the result."""
    if not calls:
        return "The server does not say which version of the weights answered."
    if len(calls) == 1:
        return f"Version {next(iter(calls))} of the weights answered all calls."
    listed = ", ".join(f"{version} ({count:,} calls)" for version, count in calls.items())
    return (
        f"Several versions of the weights answered: {listed}. With --eval-one-version, items are "
        "repeated until one version has answered all of them."
    )


def order(version: str) -> tuple[int, int]:
    """Sorts versions of a trainer by age; what other servers call theirs comes first."""
    incarnation, _, number = version.partition(".")
    is_known = incarnation.isdecimal() and number.isdecimal()
    return (int(incarnation), int(number)) if is_known else (-1, -1)
