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
    "reading": Activity("reading", "▚", "blue"),
    "syncing": SYNCING,
    "opening": SYNCING,
    "checkpointing": Activity("checkpointing", "▞", "red"),
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


def legend(split: Mapping[Activity, float], width: int) -> Text:
    """The activities with their shares, on as many lines as they need."""
    lines = [Text()]
    for activity, share in split.items():
        words = Text.assemble(
            (activity.glyph, activity.colour), (f" {activity.name} ", "dim"), f"{share:.0%}"
        )
        if lines[-1] and lines[-1].cell_len + 3 + words.cell_len > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1] else "").append_text(words)
    return Text("\n").join(lines)


def format_range(range_: RangeProgress) -> str:
    left = range_.seconds_left
    remaining = "" if left is None else f", {format_duration(left)} left"
    return f"{range_.share:.0%} of the range{remaining}"
