"""A look as a person sees it, at 80 columns."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from console.look import GroupLag, Look, PartitionLag, RunWork

COLUMNS = {"partition": 9, "committed": 12, "end": 12, "lag": 10, "behind": 8, "rebuild": 12}
"""With their least widths, so that nothing jumps when numbers grow."""
SMALLEST = 3
"""Partitions of a group that are shown however low the terminal is."""


class Screen:
    """`height` is how many lines there are; partitions with the least lag are left out."""

    def __init__(
        self, look: Look, *, all_: bool = False, height: int | None = None, trouble: str = ""
    ) -> None:
        self._look = look
        self._all = all_
        self._height = height
        self._trouble = trouble

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        look = self._look
        yield Text.assemble(("kafka ", "dim"), look.bootstrap, "   ", ("at ", "dim"), look.at)
        if self._trouble:
            yield Text(f"! {self._trouble}", "bold red", no_wrap=True, overflow="ellipsis")
        for run in look.runs:
            yield Text()
            yield from run_words(run)
        if not look.groups:
            yield Text("no consumer group has read these topics yet", "dim")
        for group in look.groups:
            yield Text()
            yield group_words(group)
            yield from self._partitions(group)

    def _partitions(self, group: GroupLag) -> Iterable[RenderableType]:
        wanted = [one for one in group.partitions if self._all or not one.is_quiet]
        shown = worst(wanted, self._room())
        if shown:
            yield table(shown)
        if left := len(wanted) - len(shown):
            yield Text(f"  and {left} more with less lag", "dim")
        quiet = len(group.partitions) - len(wanted)
        if quiet and shown:
            yield Text(
                f"  nothing waits in {quiet} others"
                if quiet > 1
                else "  nothing waits in one other",
                "dim",
            )

    def _room(self) -> int | None:
        """Partitions of each group for which there are lines."""
        if self._height is None:
            return None
        around = 2 + 3 * len(self._look.runs)
        per_group = (self._height - around) // max(1, len(self._look.groups))
        return max(SMALLEST, per_group - 4)


def worst(partitions: Sequence[PartitionLag], room: int | None) -> list[PartitionLag]:
    """As many as there is room for, those with the most lag, in their own order."""
    if room is None or len(partitions) <= room:
        return list(partitions)
    by_lag = sorted(partitions, key=lambda one: (-one.lag_seconds, -one.lag, one.partition))
    return sorted(by_lag[:room], key=lambda one: one.partition)


def run_words(run: RunWork) -> Iterator[Text]:
    named = Text.assemble(("run ", "dim"), (run.run, "bold"), no_wrap=True, overflow="ellipsis")
    if run.version is None:
        yield named.append("   no version is live yet", "dim")
    else:
        yield named.append("   version ", "dim").append(f"{run.version:,}")
    told = {
        "open trajectories": f"{run.open_trajectories:,}",
        "groups running": f"{run.groups_running:,}",
        "waiting": f"{run.groups_waiting:,}",
        "oldest": None if run.oldest_versions is None else _versions(run.oldest_versions),
    }
    words = Text(no_wrap=True, overflow="ellipsis")
    for name, value in told.items():
        if value is not None:
            words.append("   " if words else "  ").append(f"{name} ", "dim").append(value)
    yield words


def group_words(group: GroupLag) -> Text:
    members = "1 member" if group.members == 1 else f"{group.members} members"
    words = Text.assemble((group.group, "bold"), (" reads ", "dim"), group.topic, no_wrap=True)
    words.append("   ").append(members, "" if group.members else "yellow")
    words.append("   lag ", "dim").append(f"{group.lag:,}", "bold" if group.lag else "")
    if group.lag:
        words.append(f"   {duration(group.lag_seconds)} behind")
    return words


def table(partitions: Iterable[PartitionLag]) -> Table:
    drawn = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for name, width in COLUMNS.items():
        drawn.add_column(name, justify="right", no_wrap=True, min_width=width)
    for one in partitions:
        drawn.add_row(
            str(one.partition),
            _count(one.committed),
            _count(one.end),
            Text(_count(one.lag), "bold" if one.lag else "dim"),
            duration(one.lag_seconds) if one.lag else "",
            _count(one.rebuild),
        )
    return drawn


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} days"


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _versions(count: int) -> str:
    return "1 version" if count == 1 else f"{count} versions"
