"""The progress bar of long commands; it is shown on terminals only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SetDone = Callable[[int], None]


@contextmanager
def show_progress(title: str, total: int) -> Iterator[SetDone]:
    """Yields a function to call with the amount done, as often as you like: drawing is rate-limited."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
