"""How the trainer spends its time, as shares of a bar."""

from collections.abc import Mapping
from typing import NamedTuple

from rich.text import Text

from servicekit.drawing import format_duration
from trainer.progress.report import Range


class Activity(NamedTuple):
    """What a phase counts as in the time split. Glyphs differ, since a terminal may be grey."""

    name: str
    glyph: str
    colour: str


SYNCING = Activity("syncing", "▓", "cyan")
ACTIVITIES = {
    "training": Activity("training", "█", "green"),
    "waiting": Activity("waiting", "░", "yellow"),
    "syncing": SYNCING,
    "opening": SYNCING,
}
REST = Activity("other", "▒", "magenta")


def colour(phase: str) -> str:
    return ACTIVITIES.get(phase, REST).colour


def time_split(shares: Mapping[str, float]) -> dict[Activity, float]:
    """Shares of the time by activity, in a fixed order."""
    found = dict.fromkeys((*ACTIVITIES.values(), REST), 0.0)
    for phase, share in shares.items():
        found[ACTIVITIES.get(phase, REST)] += share
    return {activity: share for activity, share in found.items() if share >= 0.005}


def time_bar(split: Mapping[Activity, float], width: int) -> Text:
    bar = Text()
    done = 0.0
    for activity, share in split.items():
        cells = round((done + share) * width) - round(done * width)
        done += share
        bar.append(activity.glyph * cells, activity.colour)
    return bar


def legend(split: Mapping[Activity, float]) -> Text:
    words = Text()
    for activity, share in split.items():
        words.append("   " if words else "").append(activity.glyph, activity.colour)
        words.append(f" {activity.name} ", "dim").append(f"{share:.0%}")
    return words


def range_words(range_: Range) -> str:
    left = range_.seconds_left
    ending = "" if left is None else f", {format_duration(left)} left"
    return f"{range_.share:.0%} of the range{ending}"
