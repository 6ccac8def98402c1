"""The pieces that views are drawn with."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from trainer.progress.report import Range

LEVELS = "▁▂▃▄▅▆▇█"


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


def pairs(*told: tuple[str, float | str | None, str]) -> Text:
    """`name value` for what is known, apart from each other."""
    words = Text()
    for name, value, form in told:
        if value is not None:
            words.append("   " if words else "")
            words.append(f"{name} " if name else "", "dim")
            words.append(form.format(value))
    return words or Text("–", "dim")


def sparkline(values: Sequence[float]) -> str:
    """A curve of one line; what is not finite is a gap."""
    finite = [value for value in values if value - value == 0]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        LEVELS[round((value - low) * scale)] if value - value == 0 else " " for value in values
    )


def meter(share: float, width: int) -> Text:
    full = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * full, "green"), ("─" * (width - full), "dim"))


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


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def range_words(range_: Range) -> str:
    left = range_.seconds_left
    ending = "" if left is None else f", {duration(left)} left"
    return f"{range_.share:.0%} of the range{ending}"
