"""The demo's summary: whether the model learned, and where to look next."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from servicekit.drawing import draw_sparkline, format_duration
from steplog.demo.log_watch import LogWatch
from steplog.demo.settings import DemoSettings


def show(console: Console, settings: DemoSettings, directory: Path, watch: LogWatch) -> int:
    """Returns the exit status: 0 if the reward rose by more than chance."""
    gain = watch.reward_gain()
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim")
    rows.add_column(overflow="fold")
    if gain is not None:
        mean = f"{gain.first:.3f} in the first quarter of the versions, {gain.last:.3f} in the last"
        rows.add_row("reward", f"{mean} (standard error {gain.error:.3f})")
        rows.add_row(
            "", f"{watch.curve[0]:.2f} {draw_sparkline(watch.curve)} {watch.curve[-1]:.2f}"
        )
    conversations = sum(map(len, watch.rewards.values()))
    rate = watch.steps_per_second
    rows.add_row("versions", f"{watch.live or 0}, from {watch.trained_groups:,} trained groups")
    steps = f"{watch.steps:,} in {conversations:,} conversations"
    rows.add_row("Steps", steps + (f", {rate:.0f} per second" if rate is not None else ""))
    rows.add_row("time", format_duration(time.monotonic() - watch.began))
    console.print(rows)
    console.print()
    _print_next_commands(console, settings, directory)
    has_learned = gain is not None and gain.is_real
    console.print()
    if has_learned:
        console.print("The model learned.", style="bold green")
    else:
        console.print("The model did not learn.", style="bold red")
    return 0 if has_learned else 1


def _print_next_commands(console: Console, settings: DemoSettings, directory: Path) -> None:
    folder = _shorten(directory)
    config = f"--config {folder / 'steplog.toml'}"
    lines = {
        "show Steps": f"{_steplog()} cat steps {config} --limit 3",
        "show decisions": f"{_steplog()} cat ledger {config} --limit 3",
        "show lag": f"{_steplog()} lag {config}",
    }
    if settings.keep:
        lines["show processes"] = f"{_steplog()} status {config}"
        lines["stop everything"] = f"{_steplog()} down {config}"
    else:
        lines = {"start the broker": f"{_steplog()} kafka start {config}", **lines}
        lines["stop the broker"] = f"{_steplog()} kafka stop {config}"
    lines["checkpoints"] = str(folder / "checkpoints")
    lines["logs"] = str(folder / "stack" / "logs")
    for name, line in lines.items():  # not wrapped, so that a line can be copied
        console.print(Text.assemble((f"{name:<18}", "dim"), line), soft_wrap=True)


def _steplog() -> str:
    """The command as it was called: the console script, or `python -m steplog`."""
    program = Path(sys.argv[0]).absolute()
    if program.name == "__main__.py":
        return f"{_shorten(Path(sys.executable))} -m steplog"
    return str(_shorten(program))


def _shorten(path: Path) -> Path:
    """The path relative to the current folder, if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
