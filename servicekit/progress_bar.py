"""How far a long command is, for whoever watches it: nothing is shown unless somebody does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Moved = Callable[[int], None]


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Moved]:
    """Tell it how much is done, as often as you like: it looks at the clock itself."""
    console = Console(stderr=True)
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with shown:
        task = shown.add_task(title, total=total)
        yield lambda done: shown.update(task, completed=done)
