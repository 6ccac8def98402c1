"""Building blocks of terminal views: sparklines, meters, name-value pairs, durations."""

import math
from collections.abc import Sequence

from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"


def format_pairs(*pairs: tuple[str, float | str | None, str]) -> Text:
    """`name value   name value …`, each value in its format; pairs without a value are left out."""
    text = Text()
    for name, value, template in pairs:
        if value is not None:
            text.append("   " if text else "")
            text.append(f"{name} " if name else "", "dim")
            text.append(template.format(value))
    return text or Text("–", "dim")


def draw_sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text; values that are not finite become gaps."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        LEVELS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def draw_meter(share: float, width: int) -> Text:
    """A bar that is filled from the left by `share`, between 0 and 1."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * filled, "green"), ("─" * (width - filled), "dim"))


def format_duration(seconds: float) -> str:
    """`42 s`, `1:15 min` or `2:03:04 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"
