"""What came of it, and where to look further."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from servicekit.drawing import draw_sparkline, format_duration
from steplog.demo.settings import DemoSettings
from steplog.demo.watch import Watch


def show(console: Console, settings: DemoSettings, directory: Path, watch: Watch) -> int:
    """The exit status: 0 when rewards went up by more than chance."""
    climb = watch.climb()
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim")
    rows.add_column(overflow="fold")
    if climb is not None:
        mean = f"{climb.first:.3f} in the first quarter, {climb.last:.3f} in the last"
        rows.add_row("reward", f"{mean} (standard error {climb.error:.3f})")
        rows.add_row(
            "", f"{watch.curve[0]:.2f} {draw_sparkline(watch.curve)} {watch.curve[-1]:.2f}"
        )
    conversations = sum(map(len, watch.rewards.values()))
    rate = watch.steps_per_second
    rows.add_row("versions", f"{watch.live or 0}, from {watch.trained_groups:,} trained groups")
    told = f"{watch.steps:,} in {conversations:,} conversations"
    rows.add_row("Steps", told + (f", {rate:.0f} per second" if rate is not None else ""))
    rows.add_row("time", format_duration(time.monotonic() - watch.began))
    console.print(rows)
    console.print()
    _where_to_look(console, settings, directory)
    has_learned = climb is not None and climb.is_real
    console.print()
    if has_learned:
        console.print("It learned.", style="bold green")
    else:
        console.print("It did not learn.", style="bold red")
    return 0 if has_learned else 1


def _where_to_look(console: Console, settings: DemoSettings, directory: Path) -> None:
    shown, steplog = _short(directory), _short(Path(sys.argv[0]).absolute())
    file = f"--config {shown / 'steplog.toml'}"
    looks = {
        "every Step": f"{steplog} cat steps {file} --limit 3",
        "every decision": f"{steplog} cat ledger {file} --limit 3",
        "who is behind": f"{steplog} lag {file}",
    }
    if settings.keep:
        looks["what runs"] = f"{steplog} status {file}"
        looks["end it"] = f"{steplog} down {file}"
    else:
        looks = {"the log again": f"{steplog} kafka start {file}", **looks}
        looks["and stop it"] = f"{steplog} kafka stop {file}"
    looks["checkpoints"] = str(shown / "checkpoints")
    looks["logs"] = str(shown / "stack" / "logs")
    for name, where in looks.items():  # whole, for the clipboard, however narrow the terminal
        console.print(Text.assemble((f"{name:<16}", "dim"), where), soft_wrap=True)


def _short(directory: Path) -> Path:
    here = Path.cwd()
    return directory.relative_to(here) if directory.is_relative_to(here) else directory
