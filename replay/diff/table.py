"""Draws a comparison for a terminal, within 80 columns."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from replay.diff.comparison import Bin, ChangedGroup, ChangedTrajectory, Comparison, Distribution

BAR_WIDTH = 30


class DiffTable:
    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._sections())

    def _sections(self) -> Iterator[RenderableType]:
        comparison = self._comparison
        yield Text.assemble(
            ("old ", "dim"), comparison.old_topic, ("   new ", "dim"), comparison.new_topic
        )
        yield Text(
            f"{comparison.in_both:,} trajectories in both, {comparison.only_old:,} only in old, "
            f"{comparison.only_new:,} only in new"
        )
        yield Text()
        yield self._rewards_table()
        yield Text(f"correlation {_format_number(comparison.correlation)}")
        yield Text()
        yield _changes_table(comparison.changes)
        yield Text()
        yield from self._groups_section()
        if comparison.changed_trajectories:
            yield Text()
            yield _trajectories_table(comparison.changed_trajectories)

    def _rewards_table(self) -> Table:
        table = _new_table("", "version", "scored", "mean", "spread", text_columns=2)
        _add_row(table, "old", "", *_distribution_cells(self._comparison.old))
        _add_row(table, "new", "", *_distribution_cells(self._comparison.new))
        for function in self._comparison.functions:
            name = f"{function.side}: {function.name}"
            _add_row(table, name, function.version, *_distribution_cells(function.rewards))
        return table

    def _groups_section(self) -> Iterator[RenderableType]:
        comparison = self._comparison
        yield Text(
            f"{comparison.groups:,} groups: trainable in old {comparison.trainable_old:,}, "
            f"in new {comparison.trainable_new:,}"
        )
        yield Text(
            f"{comparison.become_trainable:,} become trainable, "
            f"{comparison.no_longer_trainable:,} are no longer, "
            f"{comparison.change_sign:,} change sign ({comparison.flipped:,} trajectories)"
        )
        if comparison.changed_groups:
            yield _groups_table(comparison.changed_groups)


def _changes_table(bins: list[Bin]) -> Table:
    table = _new_table("change", "trajectories", "", text_columns=1)
    largest = max(1, *(each.count for each in bins))
    for each in bins:
        bar = "▇" * round(BAR_WIDTH * each.count / largest)
        _add_row(table, _bin_label(each), f"{each.count:,}", bar)
    return table


def _groups_table(groups: list[ChangedGroup]) -> Table:
    table = _new_table("group", "", "steps", "members", "change sign", text_columns=2)
    for group in groups:
        position = f"{group.partition}:{group.first_offset}"
        counts = (str(group.members), str(group.flipped))
        _add_row(table, group.prompt_uid, group.change, position, *counts)
    return table


def _trajectories_table(trajectories: list[ChangedTrajectory]) -> Table:
    table = _new_table("trajectory", "prompt", "steps", "old", "new", "change", text_columns=2)
    for changed in trajectories:
        position = f"{changed.partition}:{changed.offset}"
        change = f"{changed.new - changed.old:+.4g}"
        rewards = (_format_number(changed.old), _format_number(changed.new), change)
        _add_row(table, changed.trajectory_uid, changed.prompt_uid, position, *rewards)
    return table


def _new_table(*names: str, text_columns: int) -> Table:
    """The first columns are text and the others numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(names):
        is_text = index < text_columns or not name
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def _add_row(table: Table, *cells: str) -> None:
    """As plain text, since prompt names of agents may look like rich markup."""
    table.add_row(*map(Text, cells))


def _distribution_cells(rewards: Distribution) -> tuple[str, str, str]:
    return f"{rewards.count:,}", _format_number(rewards.mean), _format_number(rewards.spread)


def _bin_label(each: Bin) -> str:
    if each.low is None or each.high is None:
        return f"below {each.high:+g}" if each.low is None else f"{each.low:+g} and more"
    if each.low < 0 < each.high:
        return "equal"
    return f"{_format_edge(each.low)} to {_format_edge(each.high)}"


def _format_edge(value: float) -> str:
    return "0" if abs(value) < 1e-3 else f"{value:+g}"


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
