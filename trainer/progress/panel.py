"""Draws the RunStatus as one panel for a terminal of at least 80 columns."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from servicekit.drawing import draw_meter, draw_sparkline, format_duration, format_pairs
from trainer.progress.run_status import UNKNOWN, RaisedAlarm, RunStatus
from trainer.progress.time_split import colour, format_range, legend, time_bar, time_split

WIDEST = 120
WIDEST_BAR = 60
LABELS = 14
"""Columns for the labels of the rows."""


class StatusPanel:
    """Drawn anew for each frame, while the lock of the RunStatus is held."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._status.lock:
            panel = self._panel(min(options.max_width, WIDEST))
        yield panel

    def _panel(self, width: int) -> Panel:
        status = self._status
        inner = width - 4
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        for label, value in self._rows(inner - LABELS):
            rows.add_row(label, value)
        incarnation = "" if status.incarnation is None else f" · incarnation {status.incarnation}"
        title = Text.assemble((status.run, "bold"), incarnation)
        return Panel(
            Group(self._headline(inner), Text(), rows, *self._alarms()),
            box=box.ROUNDED,
            title=title,
            title_align="left",
            subtitle=format_duration(status.seconds),
            subtitle_align="right",
            border_style="blue",
            width=width,
        )

    def _headline(self, width: int) -> Text:
        status = self._status
        version = "no version yet" if status.version is None else f"version {status.version:,}"
        words = Text.assemble((version, "bold"), "   ", (status.phase, colour(status.phase)))
        words.append(f" {format_duration(status.phase_seconds)}", "dim")
        if status.phase == "recovering" and status.to_recover:
            tail = f"  {status.recovered} of {status.to_recover} Decisions trained again"
            share = status.recovered / status.to_recover
        elif status.phase == "waiting" and status.target:
            tail, share = "", status.ready / status.target
        else:
            return words
        room = width - words.cell_len - len(tail) - 3
        return Text.assemble(words, "   ", draw_meter(share, max(5, min(room, 40))), tail)

    def _rows(self, width: int) -> Iterable[tuple[str, Text]]:
        status = self._status
        metrics = status.last.metrics if status.last else {}
        age = metrics if metrics.get("age_mean", UNKNOWN) > UNKNOWN else {}
        yield "reward", self._reward(width)
        yield (
            "loss",
            format_pairs(
                ("", metrics.get("loss"), "{:.4g}"),
                ("grad norm", metrics.get("grad_norm"), "{:.3g}"),
                ("entropy", metrics.get("entropy"), "{:.3g}"),
            ),
        )
        yield (
            "off policy",
            format_pairs(
                ("kl", metrics.get("mismatch_kl"), "{:.2g}"),
                ("masked", metrics.get("masked_fraction"), "{:.1%}"),
                ("ess", metrics.get("ess"), "{:.2f}"),
            ),
        )
        yield (
            "age",
            format_pairs(
                ("", age.get("age_mean"), "{:.1f} versions"),
                ("max", age.get("age_max"), "{:.0f}"),
            ),
        )
        yield (
            "tokens",
            format_pairs(
                ("", metrics.get("tokens_per_second"), "{:,.0f}/s"),
                ("last step", metrics.get("tokens"), "{:,.0f}"),
            ),
        )
        yield "queue", self._queue()
        if status.range is not None:
            words = format_range(status.range)
            bar = draw_meter(status.range.share, max(5, min(width - len(words) - 2, 40)))
            yield "range", Text.assemble(bar, "  ", words)
        split = time_split(status.split())
        yield "time", time_bar(split, min(width, WIDEST_BAR))
        yield "", legend(split, width)
        yield "trajectories", self._verdicts()
        yield "engines", self._engines()

    def _reward(self, width: int) -> Text:
        metrics = self._status.last.metrics if self._status.last else {}
        if "reward_mean" not in metrics:
            return Text("–", "dim")
        all_groups = metrics.get("reward_mean_all")
        tail = "" if all_groups is None else f"  all groups {all_groups:.3f}"
        curve = draw_sparkline(list(self._status.rewards)[-max(5, width - len(tail) - 10) :])
        return Text.assemble(
            (f"{metrics['reward_mean']:.3f}", "bold"), "  ", (curve, "green"), tail
        )

    def _queue(self) -> Text:
        status = self._status
        is_known = status.phase == "waiting" and status.target
        ready = f"{status.ready} of {status.target}" if is_known else None
        return format_pairs(("groups ready", ready, "{}"), ("lag", status.lag, "{:,} records"))

    def _verdicts(self) -> Text:
        verdicts = self._status.last.verdicts if self._status.last else {}
        ordered = sorted(verdicts.items(), key=lambda item: (item[0] != "train", -item[1]))
        return format_pairs(*((name, count, "{:,}") for name, count in ordered if count))

    def _engines(self) -> Text:
        ok, failed = self._status.engines_ok, self._status.engines_failed
        if not ok and not failed:
            return Text("–", "dim")
        if not failed:
            return Text(f"{len(ok)} of {len(ok)}")
        words = f"{len(ok)} of {len(ok) + len(failed)}, failed: {', '.join(failed)}"
        return Text(words, "bold red")

    def _alarms(self) -> Sequence[Text]:
        lines = [self._alarm(alarm) for alarm in reversed(self._status.alarms)]
        return [Text(), *lines] if lines else []

    def _alarm(self, alarm: RaisedAlarm) -> Text:
        """One line; an alarm of an earlier version is dim."""
        is_active = alarm.version == self._status.version
        when = "" if alarm.version is None else f"{alarm.version:,} "
        times = f"{alarm.times}× " if alarm.times > 1 else ""
        words = Text("! ", "bold red" if is_active else "dim", no_wrap=True, overflow="ellipsis")
        return words.append(when + times, "dim").append(alarm.sentence, "" if is_active else "dim")
