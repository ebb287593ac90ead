"""Charts of the report's page as inline SVG, from report.json's figures. Colours are the page's CSS classes.

Each chart is drawn in a box 400 units wide with text of 12 units, so that it stays legible on a phone, and has a title
and a description for screen readers. Every mark carries its figure as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .figures import bytes_text, number_text

WIDTH = 400
_LEFT, _RIGHT = 8, 392
_DECADES = 6  # of a logarithmic axis; what is smaller lies on its lower edge


@dataclass(frozen=True)
class Estimate:
    """A labelled figure with its interval."""

    label: str
    value: float
    low: float | None
    high: float | None
    text: str
    group: int = 0  # which colour


@dataclass(frozen=True)
class Curve:
    """A labelled line over evenly spaced places, first to last."""

    label: str
    values: Sequence[float]


def svg(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}. {escape(description)}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{body}</svg>"
    )


def forest(title: str, rows: Sequence[Estimate], margin: float | None) -> str:
    """Ratios on a logarithmic axis around 1, the margin as a band."""
    bounds = [x for row in rows for x in (row.value, row.low, row.high) if x is not None and 0 < x < math.inf]
    if margin is not None:
        bounds += [1 + margin, 1 / (1 + margin)]
    low, high = math.log(min([*bounds, 1.0])), math.log(max([*bounds, 1.0]))
    pad = 0.06 * (high - low) or 0.01
    scale = _Scale(low - pad, high + pad, _LEFT, _RIGHT)
    top, step = 6, 42
    bottom = top + step * len(rows)
    parts = []
    one = scale(0)
    for i, row in enumerate(rows):
        y = top + step * i
        parts.append(_text(_LEFT, y + 13, row.label, width=30))
        parts.append(_text(_RIGHT, y + 13, row.text, "end strong"))
        if margin is not None:
            a, b = scale(-math.log1p(margin)), scale(math.log1p(margin))
            parts.append(
                f'<rect class="band" x="{a:.1f}" y="{y + 18}" width="{b - a:.1f}" height="{step - 20}">'
                f"<title>margin: × {1 / (1 + margin):.4g} to × {1 + margin:.4g}</title></rect>"
            )
        parts.append(f'<line class="rule" x1="{one:.1f}" x2="{one:.1f}" y1="{y + 18}" y2="{y + step - 2}"/>')
        parts.append(_bar(scale, row, y + 29))
    parts += _axis(
        scale,
        bottom,
        _ratio_ticks(scale),
        lambda t: f"× {10 ** (t / math.log(10)):.4g}" if t < 700 else f"× 10^{t / math.log(10):.0f}",
    )
    return svg(title, "; ".join(f"{row.label}: {row.text}" for row in rows), bottom + 24, parts)


def histogram(title: str, candidate: Mapping[str, object], floor: Mapping[str, object] | None) -> str:
    """Tokens by the decimal logarithm of their KL divergence; the base's noise as an outline in front."""
    edges = [float(x) for x in candidate["log10_edges"]]  # type: ignore[attr-defined]
    series = [[float(x) for x in h["shares"]] for h in (candidate, floor) if h is not None]  # type: ignore[attr-defined]
    used = [i for i in range(len(edges) - 1) if any(s[i] > 0 for s in series)]
    if not used:
        return svg(
            title, "every divergence is below the lowest bin", 30, [_text(8, 18, "every divergence is 0", width=60)]
        )
    first, last = max(0, used[0] - 1), min(len(edges) - 2, used[-1] + 1)
    top, bottom = 22, 150
    scale = _Scale(edges[first], edges[last + 1], _LEFT, _RIGHT)
    highest = max(max(s) for s in series)

    def y(share: float) -> float:
        return bottom - (bottom - top) * share / highest

    parts = []
    for i in range(first, last + 1):
        share = series[0][i]
        if share:
            a, b = scale(edges[i]), scale(edges[i + 1])
            parts.append(
                f'<rect class="fill-0" x="{a + 0.5:.1f}" y="{y(share):.1f}" width="{b - a - 1:.1f}" '
                f'height="{bottom - y(share):.1f}"><title>10^{edges[i]:.2f} to 10^{edges[i + 1]:.2f}: '
                f"{100 * share:.2f} % of tokens</title></rect>"
            )
    description = "share of tokens by KL divergence of the candidate from the base"
    parts.append('<rect class="fill-0" x="8" y="3" width="11" height="11"/>' + _text(24, 13, "candidate"))
    if floor is not None:
        points = []
        for i in range(first, last + 1):
            points += [
                f"{scale(edges[i]):.1f},{y(series[1][i]):.1f}",
                f"{scale(edges[i + 1]):.1f},{y(series[1][i]):.1f}",
            ]
        parts.append(f'<polyline class="outline" points="{" ".join(points)}"/>')
        parts.append('<line class="outline" x1="110" x2="128" y1="9" y2="9"/>' + _text(133, 13, "base against itself"))
        description += ", over the noise of the base against itself"
    ticks = list(range(math.ceil(edges[first]), math.floor(edges[last + 1]) + 1))
    ticks = ticks[:: max(1, len(ticks) // 7)]
    parts += _axis(scale, bottom, ticks, lambda t: f"1e{t:g}")
    parts.append(_text(WIDTH / 2, bottom + 36, "KL divergence, nats per token (log scale)", "middle soft"))
    return svg(title, description, bottom + 44, parts)


def bars(title: str, rows: Sequence[tuple[str, float, int]], text: Callable[[float], str] = bytes_text) -> str:
    """Amounts as horizontal bars: (label, amount, colour); `text` writes an amount."""
    highest = max(value for _, value, _ in rows) or 1
    parts, step = [], 36
    for i, (label, value, group) in enumerate(rows):
        y = step * i
        parts.append(_text(_LEFT, y + 13, label, width=42) + _text(_RIGHT, y + 13, text(value), "end strong"))
        parts.append(
            f'<rect class="fill-{group % 6}" x="{_LEFT}" y="{y + 18}" rx="2" '
            f'width="{max(1.0, (_RIGHT - _LEFT) * value / highest):.1f}" height="10"/>'
        )
    return svg(title, "; ".join(f"{label}: {text(value)}" for label, value, _ in rows), step * len(rows), parts)


def pareto(title: str, rows: Sequence[tuple[Estimate, float]]) -> str:
    """Divergence (logarithmic, with interval) against bytes; the line joins what nothing else beats in both."""
    shown = [(e, size) for e, size in rows if e.value > 0 and math.isfinite(e.value)]
    if not shown:
        return svg(title, "no divergence to show", 30, [_text(8, 18, "no candidate differs from the base", width=60)])
    sizes = [size for _, size in shown]
    values = [math.log10(x) for e, _ in shown for x in (e.value, e.low, e.high) if x is not None and 0 < x < math.inf]
    span = (max(sizes) - min(sizes)) or max(sizes)
    across = _Scale(min(sizes) - 0.12 * span, max(sizes) + 0.12 * span, 44, _RIGHT)
    low, high = math.floor(min(values) * 2 - 0.6) / 2, math.ceil(max(values) * 2) / 2  # a label's room below the lowest
    top, bottom = 10, 210
    up = _Scale(low, high if high > low else low + 1, bottom, top)
    best = pareto_front([(size, e.value) for e, size in shown])
    parts = []
    for tick in range(math.ceil(low), math.floor(high) + 1):
        parts.append(f'<line class="grid" x1="44" x2="{_RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>')
        parts.append(_text(40, up(tick) + 4, f"1e{tick}", "end soft"))
    line = sorted((across(shown[i][1]), up(math.log10(shown[i][0].value))) for i in best)
    parts.append(f'<polyline class="front" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in line)}"/>')
    labels: list[tuple[float, float]] = []
    for i, (e, size) in sorted(enumerate(shown), key=lambda item: -item[1][0].value):
        x, y = across(size), up(math.log10(e.value))
        if e.low is not None and e.high is not None and math.isfinite(e.high):
            bottom_end = up(math.log10(e.low)) if e.low > 0 else bottom
            parts.append(
                f'<line class="ci" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom_end:.1f}" y2="{up(math.log10(e.high)):.1f}"/>'
            )
        faded = "" if i in best else " faded"
        parts.append(
            f'<circle class="fill-{e.group % 6}{faded}" cx="{x:.1f}" cy="{y:.1f}" r="5">'
            f"<title>{escape(e.label)}: {escape(e.text)}, {bytes_text(size)}</title></circle>"
        )
        side = x < 250  # above a point the front leaves to the right, below it comes from the left
        at = y - 8 if side or y + 20 > bottom else y + 17
        while any(abs(at - b) < 13 and abs(x - a) < 130 for a, b in labels):
            at += 13
        labels.append((x, at))
        parts.append(_text(x + 5 if side else x + 4, at, e.label, "" if side else "end", width=22))
    low_x, high_x = min(sizes), max(sizes)
    ticks = [low_x] if low_x == high_x or across(high_x) - across(low_x) < 90 else [low_x, high_x]
    parts += _axis(across, bottom, ticks, bytes_text)
    parts.append(_text((44 + _RIGHT) / 2, bottom + 36, "weights", "middle soft"))
    described = "; ".join(f"{e.label}: {e.text} at {bytes_text(size)}" for e, size in shown)
    return svg(title, f"KL divergence against bytes. {described}", bottom + 44, parts)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other one equals or beats in both coordinates while beating it in one."""
    return [
        i for i, (x, y) in enumerate(points) if not any((a <= x and b <= y) and (a < x or b < y) for a, b in points)
    ]


def heatmap(title: str, cells: Mapping[tuple[str, int], float], across: str = "block") -> str:
    """Values by (row label, block or what else is `across`) on a logarithmic scale of shade."""
    rows = sorted({row for row, _ in cells}, key=lambda row: min(i for i, key in enumerate(cells) if key[0] == row))
    blocks = sorted({block for _, block in cells})
    positive = [value for value in cells.values() if 0 < value < math.inf]
    low, high = (math.log(min(positive)), math.log(max(positive))) if positive else (0.0, 1.0)
    left, top, step = 92, 6, 17
    width = (_RIGHT - left) / len(blocks)
    parts = []
    for r, row in enumerate(rows):
        parts.append(_text(left - 6, top + step * r + 12, row, "end", width=13))
        for c, block in enumerate(blocks):
            value = cells.get((row, block))
            if value is None:
                continue
            shade = 1.0 if not math.isfinite(value) else 0.08 + 0.92 * _share(value, low, high)
            parts.append(
                f'<rect class="heat" fill-opacity="{shade:.2f}" x="{left + c * width:.2f}" y="{top + step * r}" '
                f'width="{max(0.5, width - 0.6):.2f}" height="{step - 1.5}"><title>{across} {block}, {escape(row)}: '
                f"{value:.4g}</title></rect>"
            )
    bottom = top + step * len(rows)
    every = max(1, math.ceil(len(blocks) / 8))
    for c in range(0, len(blocks), every):
        parts.append(_text(left + (c + 0.5) * width, bottom + 14, str(blocks[c]), "middle soft"))
    parts.append(_text(left - 6, bottom + 14, across, "end soft"))
    legend = bottom + 24
    for i in range(20):
        parts.append(
            f'<rect class="heat" fill-opacity="{0.08 + 0.92 * i / 19:.2f}" x="{left + 90 + i * 5}" y="{legend}" '
            'width="5" height="9"/>'
        )
    ends = (math.exp(low), math.exp(high)) if positive else (0.0, 0.0)
    parts.append(_text(left + 84, legend + 9, number_text(ends[0]), "end soft"))
    parts.append(_text(left + 196, legend + 9, number_text(ends[1]), "soft"))
    return svg(title, f"from {number_text(ends[0])} to {number_text(ends[1])}", legend + 16, parts)


def progress(title: str, lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], across: str, up: str) -> str:
    """Labelled lines of (place, value) on a linear axis from zero, every point a mark; the key stands above them."""
    points = [point for _, line in lines for point in line]
    highest, last = max(y for _, y in points), max(x for x, _ in points)
    left, top, bottom = 52, 30, 180
    scale = _Scale(0, last or 1, left, _RIGHT)
    step = _nice((highest or 1) / 4)
    ticks = [k * step for k in range(math.ceil((highest or 1) / step) + 1)]
    rise = _Scale(0, ticks[-1], bottom, top)
    parts = []
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{_RIGHT}" y1="{rise(tick):.1f}" y2="{rise(tick):.1f}"/>')
        parts.append(_text(left - 4, rise(tick) + 4, number_text(tick, 3), "end soft"))
    for i, (label, line) in enumerate(lines):
        x = _LEFT + 192 * i
        parts.append(f'<line class="line line-{i} dash-{i}" x1="{x}" x2="{x + 20}" y1="8" y2="8"/>')
        parts.append(_text(x + 25, 12, label, width=26))
        path = " ".join(f"{scale(a):.1f},{rise(b):.1f}" for a, b in line)
        parts.append(f'<polyline class="line line-{i} dash-{i}" points="{path}"/>')
        parts += [
            f'<circle class="line line-{i}" cx="{scale(a):.1f}" cy="{rise(b):.1f}" r="2.5">'
            f"<title>{escape(label)}, {across} {a:g}: {number_text(b)}</title></circle>"
            for a, b in line
        ]
    across_ticks = sorted({round(last * k / 4) for k in range(5)})
    parts += _axis(scale, bottom, across_ticks, lambda t: f"{t:g}")
    parts.append(_text((left + _RIGHT) / 2, bottom + 36, across, "middle soft"))
    described = "; ".join(f"{label}: {number_text(line[0][1])} to {number_text(line[-1][1])}" for label, line in lines)
    return svg(title, f"{up}, against {across}. {described}", bottom + 44, parts)


def _nice(size: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(size))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * (1 - 1e-9))


def curves(title: str, lines: Sequence[Curve], across: str, up: str) -> str:
    """Positive values on a logarithmic axis; colours and dashes tell the lines apart, the key stands above them."""
    logs = [math.log10(v) for line in lines for v in line.values if v > 0]
    if not logs:
        return svg(title, "no positive value", 30, [_text(8, 18, "no positive value", width=60)])
    low, high = max(math.floor(min(logs)), math.ceil(max(logs)) - _DECADES), math.ceil(max(logs))
    left, columns = 44, 4
    rows = math.ceil(len(lines) / columns)
    top = 18 * rows + 8
    bottom = top + 150
    scale, rise = _Scale(0, 1, left, _RIGHT), _Scale(low, high if high > low else low + 1, bottom, top)
    parts = []
    for i, line in enumerate(lines):
        x, y = _LEFT + (i % columns) * 96, 18 * (i // columns) + 12
        parts.append(
            f'<line class="line line-{i % 6} dash-{i // 6}" x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}"/>'
        )
        parts.append(_text(x + 25, y, line.label, width=11))
    for tick in range(math.ceil(low), math.floor(high) + 1):
        parts.append(f'<line class="grid" x1="{left}" x2="{_RIGHT}" y1="{rise(tick):.1f}" y2="{rise(tick):.1f}"/>')
        parts.append(_text(left - 4, rise(tick) + 4, f"1e{tick}", "end soft"))
    for i, line in enumerate(lines):
        last = len(line.values) - 1
        points = [
            f"{scale(k / last if last else 0):.1f},{rise(max(low, math.log10(v) if v > 0 else low)):.1f}"
            for k, v in enumerate(line.values)
        ]
        parts.append(
            f'<polyline class="line line-{i % 6} dash-{i // 6}" points="{" ".join(points)}">'
            f"<title>{escape(line.label)}: from {number_text(line.values[0])} to {number_text(line.values[-1])}</title>"
            "</polyline>"
        )
    parts.append(f'<line class="axis" x1="{left}" x2="{_RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text((left + _RIGHT) / 2, bottom + 18, across, "middle soft"))
    described = "; ".join(f"{line.label}: {number_text(line.values[-1])} at the end" for line in lines)
    return svg(title, f"{up}, against {across}. {described}", bottom + 26, parts)


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, x: float) -> float:
        return self.start + (self.end - self.start) * (x - self.low) / (self.high - self.low)


def _bar(scale: _Scale, row: Estimate, y: float) -> str:
    def at(x: float | None) -> float | None:
        return scale(math.log(x)) if x is not None and 0 < x < math.inf else None

    point, low, high = at(row.value), at(row.low), at(row.high)
    if point is None:
        return _text(_LEFT, y + 4, f"off the axis: {row.text}", "soft")
    parts = []
    if low is not None and high is not None:
        parts.append(f'<line class="ci" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>')
        parts += [f'<line class="ci" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 5}" y2="{y + 5}"/>' for x in (low, high)]
    parts.append(
        f'<circle class="fill-{row.group % 6}" cx="{point:.1f}" cy="{y}" r="5"><title>{escape(row.label)}: '
        f"{escape(row.text)}</title></circle>"
    )
    return "".join(parts)


def _ratio_ticks(scale: _Scale) -> list[float]:
    """Round ratios within the axis, 1 among them, at most seven."""
    if scale.high - scale.low > 4:  # ratios of more than fifty: powers of ten
        decades = (scale.high - scale.low) / math.log(10)
        step = max(1, math.ceil(decades / 6))
        lowest = math.ceil(scale.low / math.log(10) / step) * step
        return [k * math.log(10) for k in range(lowest, math.floor(scale.high / math.log(10)) + 1, step)]
    span = math.exp(scale.high) - math.exp(scale.low)
    step = 10 ** math.floor(math.log10(span / 3))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= 6:
            step *= factor
            break
    first = math.ceil((math.exp(scale.low) - 1) / step)
    last = math.floor((math.exp(scale.high) - 1) / step)
    return [math.log(1 + k * step) for k in range(first, last + 1) if 1 + k * step > 0]


def _axis(scale: _Scale, y: float, ticks: Sequence[float], label: object) -> list[str]:
    parts = [f'<line class="axis" x1="{scale.start:.1f}" x2="{scale.end:.1f}" y1="{y}" y2="{y}"/>']
    taken = -math.inf
    for tick in ticks:
        x = scale(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>')
        text = label(tick)  # type: ignore[operator]
        half = 3.9 * len(text)
        centre = min(max(x, half), WIDTH - half)
        if centre - half > taken:
            parts.append(_text(centre, y + 18, text, "middle soft"))
            taken = centre + half + 6
    return parts


def _text(x: float, y: float, text: str, classes: str = "", width: int = 60) -> str:
    cut = text if len(text) <= width else f"{text[: width - 1]}…"
    hint = "" if cut == text else f"<title>{escape(text)}</title>"
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{escape(cut)}{hint}</text>'


def _share(value: float, low: float, high: float) -> float:
    return 0.0 if value <= 0 else 1.0 if high == low else (math.log(value) - low) / (high - low)
