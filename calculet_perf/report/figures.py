"""The report's figures, from its data (acceptance §16)."""

from __future__ import annotations

from collections.abc import Sequence

from calculet_perf.comparison import CellDelta, Comparison
from calculet_perf.evidence import Slow, TimelinePoint
from calculet_perf.joins import PARTS
from calculet_perf.report.drawing import Dot, Figure, Line, Path, Rect, Scale, Text, linear, logarithmic, number
from calculet_perf.report.model import CellReport, CurvePoint
from calculet_perf.stability import Finding
from calculet_perf.statistics.compare import Direction

WIDTH = 760.0
ROW = 22.0
MOST_ROWS = 60
"""More rows than that say nothing in a picture; the tables have all."""


def slowest(requests: Sequence[Slow], told: Sequence[str] = PARTS) -> Figure | None:
    """Where the slowest requests' time went; `told` are the parts that any step tells."""
    if not requests:
        return None
    left, right, top = 250.0, WIDTH - 70, 46.0
    figure = Figure(
        "The slowest requests",
        "Stacked bars: each part of each of the slowest requests' end-to-end time.",
        WIDTH,
        top + ROW * len(requests) + 24,
    )
    scale = linear([slow.e2e_ms for slow in requests], left, right, zero=True)
    names = [(part.replace("_", " "), f"part{index}") for index, part in enumerate(PARTS) if part in told]
    _legend(figure, [*names, ("unattributed", "rest")])
    _x_axis(figure, scale, top, figure.height - 24, "ms")
    for row, slow in enumerate(requests):
        y = top + ROW * row
        figure.add(Text(left - 8, y + 14, _short(f"{slow.request_id[-8:]}  {slow.case}", 38), "end"))
        at = 0.0
        parts = [getattr(slow.parts, part) or 0.0 for part in PARTS] if slow.parts else [0.0] * len(PARTS)
        for index, (part, value) in enumerate(zip(PARTS, parts, strict=True)):
            if value > 0:
                figure.add(_bar(scale, at, at + value, y, f"part{index}", f"{part} {number(value)} ms"))
                at += value
        figure.add(_bar(scale, at, slow.e2e_ms, y, "rest", f"unattributed {number(max(0.0, slow.e2e_ms - at))} ms"))
        mark = f"{number(slow.e2e_ms)}" + (" throttled" if slow.throttled else "") + (" failed" if slow.error else "")
        figure.add(Text(scale(slow.e2e_ms) + 5, y + 14, mark, role="value"))
    return figure


def _bar(scale: Scale, begin: float, end: float, y: float, role: str, title: str) -> Rect:
    return Rect(scale(begin), y + 4, max(0.0, scale(end) - scale(begin)), ROW - 8, role, title)


def context_curve(points: Sequence[CurvePoint]) -> Figure | None:
    """TPOT against context length."""
    shown = [point for point in points if point.p50 is not None]
    if len(shown) < 2:
        return None
    figure = Figure(
        "Time per token against context", "P50 with its exact 95 % interval, and P99, for one request at a time.", WIDTH, 300
    )
    left, right, top, bottom = 64.0, WIDTH - 30, 40.0, 258.0
    x = logarithmic([point.prompt_tokens for point in shown], left, right)
    values = [value for point in shown for value in (point.p50, point.p50_low, point.p50_high, point.p99) if value is not None]
    y = linear(values, bottom, top, zero=True)
    _legend(figure, [("P50, 95 % interval", "series0"), ("P99", "series1"), ("P99 not certified", "faint")])
    for tick in y.ticks():
        figure.add(Line(left, y(tick), right, y(tick), "grid"), Text(left - 6, y(tick) + 3, number(tick), "end"))
    figure.add(Text(left, top - 8, "ms", "end"))
    for point in shown:
        at = x(point.prompt_tokens)
        figure.add(Line(at, bottom, at, bottom + 4, "axis"))
    _spread_labels(figure, [(x(point.prompt_tokens), f"{point.prompt_tokens:,}") for point in shown], bottom + 16)
    figure.add(Line(left, bottom, right, bottom, "axis"), Text(right, bottom + 32, "prompt tokens", "end"))
    for name, role in (("p99", "series1"), ("p50", "series0")):
        line = [(x(point.prompt_tokens), y(getattr(point, name))) for point in shown if getattr(point, name) is not None]
        figure.add(Path(tuple(line), f"line {role}"))
    for point in shown:
        at = x(point.prompt_tokens)
        if point.p50_low is not None and point.p50_high is not None:
            figure.add(Line(at, y(point.p50_low), at, y(point.p50_high), "whisker series0"))
        if point.p99 is not None:
            role = "series1" if point.certified_p99 else "faint"
            figure.add(Dot(at, y(point.p99), 3.5, f"dot {role}", f"{point.cell}: P99 {number(point.p99)} ms, n={point.count}"))
        assert point.p50 is not None
        figure.add(Dot(at, y(point.p50), 3.5, "dot series0", f"{point.cell}: P50 {number(point.p50)} ms, n={point.count}"))
    return figure


def cells(reports: Sequence[CellReport], metric: str, title: str) -> Figure | None:
    """P50 to P99 of every cell."""
    rows = [(cell, cell.metrics[metric].quantiles) for cell in reports if metric in cell.metrics][:MOST_ROWS]
    rows = [(cell, quantiles) for cell, quantiles in rows if quantiles["p50"].value is not None]
    if not rows:
        return None
    left, right, top = 254.0, WIDTH - 60, 46.0
    figure = Figure(title, f"{title} of every cell, P50, P90 and P99.", WIDTH, top + ROW * len(rows) + 24)
    values = [quantiles[name].value for _, quantiles in rows for name in ("p50", "p90", "p99")]
    scale = logarithmic([value for value in values if value], left, right)
    _legend(figure, [("P50", "series0"), ("P90", "series2"), ("P99", "series1"), ("not certified", "faint")])
    _x_axis(figure, scale, top, figure.height - 24, "ms, logarithmic")
    for row, (cell, quantiles) in enumerate(rows):
        y = top + ROW * row + ROW / 2
        name = cell.cell + (f" [{cell.stratum}]" if cell.stratum else "")
        figure.add(Text(left - 8, y + 3, _short(name, 44), "end"))
        last = next((quantiles[name].value for name in ("p99", "p90", "p50") if quantiles[name].value is not None), None)
        first = quantiles["p50"].value
        assert first is not None and last is not None
        figure.add(Line(scale(first), y, scale(last), y, "whisker grid"))
        for quantile, role in (("p99", "series1"), ("p90", "series2"), ("p50", "series0")):
            value = quantiles[quantile].value
            if value is not None:
                style = role if quantiles[quantile].certified else "faint"
                tip = f"{name}: {quantile.upper()} {number(value)} ms, n={cell.count}"
                figure.add(Dot(scale(value), y, 4, f"dot {style}", tip))
        if quantiles["p99"].unbounded:
            figure.add(Text(right + 6, y + 3, "fails", role="worse"))
    return figure


def forest(comparison: Comparison, metric: str, quantile: str | None, title: str) -> Figure | None:
    """Candidate against base in every cell: winners and losers, by size."""
    rows = [delta for delta in comparison.deltas if delta.metric == metric and delta.quantile == quantile]
    rows = sorted((delta for delta in rows if delta.delta_pct is not None), key=lambda delta: delta.delta_pct or 0.0)[:MOST_ROWS]
    if not rows:
        return None
    left, right, top = 254.0, WIDTH - 80, 46.0
    direction = "less is better" if rows[0].direction == Direction.LOWER_IS_BETTER else "more is better"
    figure = Figure(
        f"{title}: candidate against base",
        f"Change in percent with its 95 % interval; {direction}.",
        WIDTH,
        top + ROW * len(rows) + 24,
    )
    ends = [value for delta in rows for value in (delta.delta_pct, delta.low_pct, delta.high_pct) if value is not None]
    # A cell with few samples may be anywhere; the others must stay readable beside it.
    most = 3 * max([5.0, *(abs(delta.delta_pct or 0.0) for delta in rows)])
    scale = linear([*(min(max(end, -most), most) for end in ends), 0.0], left, right)
    _legend(figure, [("better", "better"), ("worse", "worse"), ("undecided", "faint")])
    _x_axis(figure, scale, top, figure.height - 24, f"% change; {direction}")
    figure.add(Line(scale(0), top - 4, scale(0), figure.height - 24, "axis"))
    for row, delta in enumerate(rows):
        y = top + ROW * row + ROW / 2
        role = delta.change if delta.change in ("better", "worse") else "faint"
        low, high = (
            scale(scale.low if delta.low_pct is None else delta.low_pct),
            scale(scale.high if delta.high_pct is None else delta.high_pct),
        )
        assert delta.delta_pct is not None
        figure.add(
            Text(left - 8, y + 3, _short(delta.cell, 44), "end"),
            Line(low, y, high, y, f"whisker {role}"),
            Dot(scale(delta.delta_pct), y, 4, f"dot {role}", _delta_tip(delta)),
            Text(high + 6, y + 3, f"{delta.delta_pct:+.1f} %", role="value"),
        )
    return figure


def _delta_tip(delta: CellDelta) -> str:
    return f"{delta.cell}: {number(delta.base)} to {number(delta.candidate)} {delta.unit}, resampled {delta.method}"


def leak(finding: Finding) -> Figure | None:
    """A resource over the run."""
    if len(finding.series) < 3:
        return None
    figure = Figure(f"{finding.board} {finding.resource}", finding.why, 360, 110)
    left, right, top, bottom = 56.0, 350.0, 22.0, 86.0
    x = Scale(finding.series[0][0], max(finding.series[-1][0], finding.series[0][0] + 1e-9), left, right)
    y = linear([value for _, value in finding.series], bottom, top)
    for tick in y.ticks(3):
        figure.add(Line(left, y(tick), right, y(tick), "grid"), Text(left - 4, y(tick) + 3, si(tick), "end", size=8))
    role = {"leak": "worse", "no_leak": "better"}.get(str(finding.outcome), "faint")
    figure.add(Path(tuple((x(at), y(value)) for at, value in finding.series), f"line {role}"))
    figure.add(Text(right, bottom + 16, f"{finding.series[-1][0]:.3g} h", "end", size=8))
    return figure


def device(points: Sequence[TimelinePoint]) -> Figure | None:
    """Temperature and throttling over the run."""
    known = [(point.hours, point.temperature_c, point.throttled) for point in points if point.temperature_c is not None]
    if len(known) < 3:
        return None
    figure = Figure("Hottest chip", "Temperature of the hottest chip over the run; marked where a chip was throttled.", WIDTH, 170)
    left, right, top, bottom = 64.0, WIDTH - 30, 34.0, 132.0
    x = Scale(known[0][0], max(known[-1][0], known[0][0] + 1e-9), left, right)
    y = linear([temperature for _, temperature, _ in known], bottom, top)
    _legend(figure, [("temperature, C", "series0"), ("throttled", "worse")])
    for tick in y.ticks(4):
        figure.add(Line(left, y(tick), right, y(tick), "grid"), Text(left - 6, y(tick) + 3, number(tick), "end"))
    for tick in x.ticks():
        figure.add(Text(x(tick), bottom + 16, f"{tick:.3g}", "middle"))
    figure.add(Line(left, bottom, right, bottom, "axis"), Text(right, bottom + 30, "hours", "end"))
    figure.add(Path(tuple((x(at), y(temperature)) for at, temperature, _ in known), "line series0"))
    for at, temperature, throttled in known:
        if throttled:
            figure.add(Dot(x(at), y(temperature), 3, "dot worse", "throttled"))
    return figure


def si(value: float) -> str:
    """With a prefix: 1.5M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{suffix}"
    return f"{value:.4g}"


def _legend(figure: Figure, entries: Sequence[tuple[str, str]]) -> None:
    at = 8.0
    for text, role in entries:
        figure.add(Rect(at, 8, 10, 10, f"key {role}"), Text(at + 14, 17, text))
        at += 26 + 5.6 * len(text)


def _x_axis(figure: Figure, scale: Scale, top: float, bottom: float, unit: str) -> None:
    labels = []
    for tick in scale.ticks():
        figure.add(Line(scale(tick), top - 4, scale(tick), bottom, "grid"))
        labels.append((scale(tick), number(tick)))
    _spread_labels(figure, labels, bottom + 14)
    figure.add(Text(scale.begin - 8, bottom + 14, unit, "end"))


def _spread_labels(figure: Figure, labels: Sequence[tuple[float, str]], y: float) -> None:
    """Only labels that do not run into the one before."""
    free = -1e9
    for at, text in labels:
        half = 2.9 * len(text)
        if at - half >= free:
            figure.add(Text(at, y, text, "middle"))
            free = at + half + 6


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
