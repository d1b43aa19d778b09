"""Charts: their scale, axes, gaps, titles and tables."""

import re
from datetime import UTC, datetime
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.console.charts import Series, chart_of, minutes_plot, plot, time_ticks
from postroom.adapters.console.samples import SAMPLES
from postroom.adapters.console.sparklines import describe_trend, sparkline, trend
from postroom.adapters.console.values import DASH, span
from postroom.application.ports.facets import Timeline

HOUR_MS = 3_600_000
NOW = int(datetime(2026, 11, 30, 12, 34, tzinfo=UTC).timestamp() * 1_000)


def paths(svg: str, kind: str) -> list[str]:
    """Return what the paths of a kind draw."""
    return re.findall(rf'<path class="{kind}[^"]*" d="([^"]+)"', svg)


def heights(svg: str, kind: str) -> list[float]:
    """Return the heights of the points of lines, in percent of the scale."""
    return [100 - float(y) for path in paths(svg, kind) for y in re.findall(r"\d+\.5 ([\d.]+)", path)]


@given(st.lists(st.none() | st.floats(0, 1e15), min_size=1, max_size=80), st.booleans())
def test_a_scale_begins_at_zero_and_has_room_for_every_value(
    values: list[float | None], is_time: bool
) -> None:
    moments = [str(index) for index in range(len(values))]
    chart = plot("t", [Series("s", values)], moments, [], is_time=is_time)
    assert chart.ticks[0] == (100.0, "0", "middle")
    assert [each.at for each in chart.ticks] == sorted((each.at for each in chart.ticks), reverse=True)
    assert chart.ticks[-1].at == 0.0
    assert 2 <= len(chart.ticks) <= 12
    shown = [*heights(chart.svg, "plot-line"), *heights(chart.svg, "plot-dot")[::2]]
    assert len(shown) == sum(value is not None for value in values)
    assert all(0 <= each <= 100 for each in shown)
    assert len(chart.rows) == len(values)


def test_values_are_as_high_as_the_scale_says() -> None:
    chart = plot("t", [Series("s", [0, 5, 10, 20])], ["a", "b", "c", "d"], [])
    assert [each.text for each in chart.ticks] == ["0", "5", "10", "15", "20"]
    assert heights(chart.svg, "plot-line") == [0, 25, 50, 100]
    times = plot("t", [Series("s", [0, 90_000])], ["a", "b"], [], write=span, is_time=True)
    assert [each.text for each in times.ticks] == [
        "0",
        *(f"{each}\N{NO-BREAK SPACE}{unit}" for each, unit in ((30, "s"), (1, "min"), (1.5, "min"))),
    ]


def test_what_was_not_measured_is_a_gap_and_not_zero() -> None:
    chart = plot("t", [Series("s", [1, None, 0, 3])], ["a", "b", "c", "d"], [])
    (line,) = paths(chart.svg, "plot-line")
    (dot,) = paths(chart.svg, "plot-dot")
    assert (line.count("M"), dot.count("M")) == (1, 1)
    assert re.findall(r"<title>([^<]*)", chart.svg) == ["a: 1", "c: 0", "d: 3"]
    assert chart.rows == [["a", "1"], ["b", DASH], ["c", "0"], ["d", "3"]]
    assert "0 not measured" not in chart.svg
    assert "s not measured" in plot("t", [Series("s", [None])], ["a"], []).svg


def test_text_of_others_is_escaped() -> None:
    chart = plot("<b>", [Series("<i>", [1]), Series("&", [2])], ['"><script>'], [])
    assert "<b>" not in chart.svg
    assert "<script>" not in chart.svg
    assert "&lt;i&gt; 1, &amp; 2" in chart.svg
    assert "<b>" not in sparkline([1.0], "<b>")
    assert "<b>" not in trend([1], 0, 1, "<b>")


def test_low_bars_are_seen_and_zero_has_none() -> None:
    chart = plot("t", [Series("s", [0, 1, 1_000], is_bars=True)], ["a", "b", "c"], [])
    (bars,) = paths(chart.svg, "plot-bars")
    assert re.findall(r"M(\d)\.1 100V([\d.]+)", bars) == [("1", "98.5"), ("2", "0")]


def test_samples_keep_their_place_until_the_chart_moves_on() -> None:
    values = [float(each % 7) for each in range(2 * SAMPLES)]
    charts = [
        minutes_plot("t", [Series("s", values[max(0, taken - SAMPLES) : taken])], taken)
        for taken in range(1, len(values))
    ]
    for before, after in pairwise(charts):
        texts = [[row[1] for row in each.rows] for each in (before, after)]
        changed = [one != other for one, other in zip(*texts, strict=True)]
        moved = [one != other for one, other in zip(texts[0][1:], texts[1][:-1], strict=True)]
        # The first value may lack samples that are forgotten.
        assert sum(changed[1:-1]) == 0 or sum(moved[1:-1]) == 0
    assert all(len(each.rows) == SAMPLES // 4 for each in charts)
    assert [each.text for each in charts[0].times] == [
        *(f"\N{MINUS SIGN}{at} min" for at in (10, 8, 6, 4, 2)),
        "now",
    ]
    assert charts[0].rows[-1][0] == "now"


@given(st.integers(0, 4 * 10**12), st.integers(1, 10**12))
def test_times_below_a_chart_are_few_round_and_within_it(start: int, length: int) -> None:
    ticks = time_ticks(start, start + length)
    assert len(ticks) <= 8
    assert all(0 <= each.at <= 100 for each in ticks)
    assert len({each.at for each in ticks}) == len(ticks)


def test_times_are_as_precise_as_they_need_to_be() -> None:
    def texts(length: int) -> list[str]:
        return [each.text for each in time_ticks(NOW - length, NOW)]

    assert texts(HOUR_MS) == ["11:40", "11:50", "12:00", "12:10", "12:20", "12:30"]
    assert texts(24 * HOUR_MS) == ["18:00", "11-30", "06:00", "12:00"]
    assert texts(7 * 24 * HOUR_MS)[-1] == "11-29"
    assert texts(10)[0].startswith("59.99")


def test_bars_of_a_timeline_are_links_with_their_counts() -> None:
    timeline = Timeline("messages", NOW - NOW % 60_000, 60_000, (0, 12, 1))
    chart, note, width = chart_of(timeline, lambda start, end: f"/search?from={start}&to={end}")
    links = re.findall(r'<a href="([^"]+)" aria-label="([^"]+)"', chart.svg)
    start = timeline.start + 60_000
    assert links[0] == (
        f"/search?from={start}&amp;to={start + 59_999}",
        "2026-11-30T12:35:00.000Z: 12",
    )
    assert (len(links), note, width) == (2, "All 13 messages.", "1\N{NO-BREAK SPACE}min")
    assert [row[1] for row in chart.rows] == ["0", "12", "1"]


def test_trends_show_and_tell_when_there_were_how_many() -> None:
    start = NOW * 1_000
    svg = trend([0, 3, 1], start, 60_000_000, "Dead letters")
    assert re.findall(r"<title>([^<]*)", svg) == [
        "Dead letters: 3 at most",
        "2026-11-30 12:35: 3",
        "2026-11-30 12:36: 1",
    ]
    assert describe_trend([0, 3, 1], start, 60_000_000) == "2026-11-30 12:35: 3, 2026-11-30 12:36: 1"
    assert trend([], 0, 1, "none").count("<rect") == 0


def test_a_line_of_zeros_is_on_its_base() -> None:
    svg = sparkline([0.0, 0.0], "Unsettled")
    assert re.findall(r' d="M0\.0 ([\d.]+)L', svg) == ["28.0"]
    assert "0 now, 0 at most" in svg
