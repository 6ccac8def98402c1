"""Building blocks of terminal views: sparklines, meters, name-value pairs, durations."""

from collections.abc import Sequence

from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"


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


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"
