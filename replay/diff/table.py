"""A comparison as a person sees it, at 80 columns."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from replay.diff.comparison import Bin, ChangedGroup, ChangedTrajectory, Comparison, Distribution

BAR = 30


class DiffTable:
    def __init__(self, found: Comparison) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        found = self._found
        yield Text.assemble(("old ", "dim"), found.old_topic, ("   new ", "dim"), found.new_topic)
        yield Text(
            f"{found.in_both:,} trajectories in both, {found.only_old:,} only in old, "
            f"{found.only_new:,} only in new"
        )
        yield Text()
        yield self._rewards()
        yield Text(f"correlation {_number(found.correlation)}")
        yield Text()
        yield changes(found.changes)
        yield Text()
        yield from self._groups()
        if found.changed_trajectories:
            yield Text()
            yield trajectories(found.changed_trajectories)

    def _rewards(self) -> Table:
        drawn = _table("", "version", "scored", "mean", "spread", left=2)
        _add(drawn, "old", "", *_row(self._found.old))
        _add(drawn, "new", "", *_row(self._found.new))
        for one in self._found.functions:
            _add(drawn, f"{one.side}: {one.name}", one.version, *_row(one.rewards))
        return drawn

    def _groups(self) -> Iterator[RenderableType]:
        found = self._found
        yield Text(
            f"{found.groups:,} groups: trainable in old {found.trainable_old:,}, "
            f"in new {found.trainable_new:,}"
        )
        yield Text(
            f"{found.become_trainable:,} become trainable, {found.no_longer_trainable:,} are no "
            f"longer, {found.change_sign:,} change sign ({found.flipped:,} trajectories)"
        )
        if found.changed_groups:
            yield groups(found.changed_groups)


def changes(bins: list[Bin]) -> Table:
    drawn = _table("change", "trajectories", "", left=1)
    most = max(1, *(one.count for one in bins))
    for one in bins:
        _add(drawn, _label(one), f"{one.count:,}", "▇" * round(BAR * one.count / most))
    return drawn


def groups(found: list[ChangedGroup]) -> Table:
    drawn = _table("group", "", "steps", "members", "change sign", left=2)
    for one in found:
        place = f"{one.partition}:{one.first_offset}"
        _add(drawn, one.prompt_uid, one.what, place, str(one.members), str(one.flipped))
    return drawn


def trajectories(found: list[ChangedTrajectory]) -> Table:
    drawn = _table("trajectory", "prompt", "steps", "old", "new", "change", left=2)
    for one in found:
        rewards = (_number(one.old), _number(one.new), f"{one.new - one.old:+.4g}")
        place = f"{one.partition}:{one.offset}"
        _add(drawn, one.trajectory_uid, one.prompt_uid, place, *rewards)
    return drawn


def _table(*names: str, left: int) -> Table:
    """The first columns are text, and the others numbers."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for at, name in enumerate(names):
        drawn.add_column(
            name, justify="left" if at < left or not name else "right", overflow="fold"
        )
    return drawn


def _add(drawn: Table, *cells: str) -> None:
    """As text, since agents may name their prompts in what rich takes for markup."""
    drawn.add_row(*map(Text, cells))


def _row(rewards: Distribution) -> tuple[str, str, str]:
    return f"{rewards.count:,}", _number(rewards.mean), _number(rewards.spread)


def _label(one: Bin) -> str:
    if one.low is None or one.high is None:
        return f"below {one.high:+g}" if one.low is None else f"{one.low:+g} and more"
    if one.low < 0 < one.high:
        return "equal"
    return f"{_edge(one.low)} to {_edge(one.high)}"


def _edge(value: float) -> str:
    return "0" if abs(value) < 1e-3 else f"{value:+g}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
