"""Draws how the trainer spends its time, as a bar of shares."""

from collections.abc import Mapping
from typing import NamedTuple

from rich.text import Text

from servicekit.drawing import format_duration
from trainer.progress.run_status import RangeProgress


class Activity(NamedTuple):
    """An entry of the time split, for one or several phases. Glyphs differ, as colors may not show."""

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
OTHER_ACTIVITY = Activity("other", "▒", "magenta")


def colour(phase: str) -> str:
    return ACTIVITIES.get(phase, OTHER_ACTIVITY).colour


def time_split(shares: Mapping[str, float]) -> dict[Activity, float]:
    """Shares of the time by activity, in a fixed order."""
    split = dict.fromkeys((*ACTIVITIES.values(), OTHER_ACTIVITY), 0.0)
    for phase, share in shares.items():
        split[ACTIVITIES.get(phase, OTHER_ACTIVITY)] += share
    return {activity: share for activity, share in split.items() if share >= 0.005}


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


def format_range(range_: RangeProgress) -> str:
    left = range_.seconds_left
    remaining = "" if left is None else f", {format_duration(left)} left"
    return f"{range_.share:.0%} of the range{remaining}"
