"""A snapshot as text for people, 80 columns wide."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from console.snapshot import ClusterSnapshot, GroupLag, PartitionLag, RunBacklog

COLUMNS = {"partition": 9, "committed": 12, "end": 12, "lag": 10, "behind": 8, "rebuild": 12}
"""Columns and their smallest widths, so that the layout stays when numbers grow."""
MIN_PARTITIONS = 3
"""Partitions of a group that are shown even in a terminal with few lines."""


class LagView:
    """`height` is the number of lines of the terminal; if there are too few, the partitions with
    the least lag are left out. `error` says why the snapshot could not be refreshed."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        *,
        all_: bool = False,
        height: int | None = None,
        error: str = "",
    ) -> None:
        self._snapshot = snapshot
        self._all = all_
        self._height = height
        self._error = error

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        snapshot = self._snapshot
        yield Text.assemble(
            ("kafka ", "dim"), snapshot.bootstrap, "   ", ("at ", "dim"), snapshot.at
        )
        if self._error:
            yield Text(f"! {self._error}", "bold red", no_wrap=True, overflow="ellipsis")
        for run in snapshot.runs:
            yield Text()
            yield from format_run(run)
        if not snapshot.groups:
            yield Text("No consumer group has read these topics yet.", "dim")
        for group in snapshot.groups:
            yield Text()
            yield format_group(group)
            yield from self._partitions(group)

    def _partitions(self, group: GroupLag) -> Iterable[RenderableType]:
        busy = [partition for partition in group.partitions if self._all or not partition.is_quiet]
        visible = largest_lags(busy, self._rows_per_group())
        if visible:
            yield make_table(visible)
        if hidden := len(busy) - len(visible):
            yield Text(f"  and {hidden} more with less lag", "dim")
        quiet = len(group.partitions) - len(busy)
        if quiet and visible:
            yield Text(
                f"  {quiet} other partitions have no lag"
                if quiet > 1
                else "  1 other partition has no lag",
                "dim",
            )

    def _rows_per_group(self) -> int | None:
        """How many partitions of each group fit."""
        if self._height is None:
            return None
        around = 2 + 3 * len(self._snapshot.runs)
        per_group = (self._height - around) // max(1, len(self._snapshot.groups))
        return max(MIN_PARTITIONS, per_group - 4)


def largest_lags(partitions: Sequence[PartitionLag], room: int | None) -> list[PartitionLag]:
    """The partitions with the most lag, as many as there is room for, ordered by number."""
    if room is None or len(partitions) <= room:
        return list(partitions)
    by_lag = sorted(
        partitions,
        key=lambda partition: (-partition.lag_seconds, -partition.lag, partition.partition),
    )
    return sorted(by_lag[:room], key=lambda partition: partition.partition)


def format_run(run: RunBacklog) -> Iterator[Text]:
    title = Text.assemble(("run ", "dim"), (run.run, "bold"), no_wrap=True, overflow="ellipsis")
    if run.version is None:
        yield title.append("   no live version yet", "dim")
    else:
        yield title.append("   version ", "dim").append(f"{run.version:,}")
    facts = {
        "open trajectories": f"{run.open_trajectories:,}",
        "groups running": f"{run.groups_running:,}",
        "waiting": f"{run.groups_waiting:,}",
        "oldest": None if run.oldest_versions is None else _versions(run.oldest_versions),
    }
    words = Text(no_wrap=True, overflow="ellipsis")
    for name, value in facts.items():
        if value is not None:
            words.append("   " if words else "  ").append(f"{name} ", "dim").append(value)
    yield words


def format_group(group: GroupLag) -> Text:
    members = "1 member" if group.members == 1 else f"{group.members} members"
    words = Text.assemble((group.group, "bold"), (" reads ", "dim"), group.topic, no_wrap=True)
    words.append("   ").append(members, "" if group.members else "yellow")
    words.append("   lag ", "dim").append(f"{group.lag:,}", "bold" if group.lag else "")
    if group.lag:
        words.append(f"   {format_age(group.lag_seconds)} behind")
    return words


def make_table(partitions: Iterable[PartitionLag]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for name, width in COLUMNS.items():
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for partition in partitions:
        table.add_row(
            str(partition.partition),
            _count(partition.committed),
            _count(partition.end),
            Text(_count(partition.lag), "bold" if partition.lag else "dim"),
            format_age(partition.lag_seconds) if partition.lag else "",
            _count(partition.rebuild),
        )
    return table


def format_age(seconds: float) -> str:
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
