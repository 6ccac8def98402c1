"""Sparklines, meters and durations."""

from servicekit.drawing import draw_meter, draw_sparkline, format_duration


def test_a_sparkline_spans_its_values_and_leaves_gaps() -> None:
    assert draw_sparkline([0, 1, float("nan"), 7]) == "▁▂ █"
    assert draw_sparkline([3.0, 3.0]) == "▁▁"
    assert draw_sparkline([]) == ""


def test_a_meter_has_its_width_whatever_the_share() -> None:
    assert [draw_meter(share, 4).plain for share in (-1, 0.5, 2)] == ["────", "━━──", "━━━━"]


def test_durations() -> None:
    assert [format_duration(s) for s in (3.4, 75, 7384)] == ["3 s", "1:15 min", "2:03:04 h"]
