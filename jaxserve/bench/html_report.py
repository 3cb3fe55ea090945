"""An HTML page with the figures of `jaxserve bench serve` and plots drawn as SVG: one file, nothing to load."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from jaxserve.bench.serving import ServingReport
from jaxserve.html_page import document, table

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 220, 44, 28


def page(reports: Sequence[ServingReport], settings: dict[str, Any]) -> str:
    """The whole document. `settings` say what was run."""
    body = "".join(_section(report) for report in reports)
    return document("jaxserve bench serve", f"<h1>Serving</h1>{table(settings.items())}{body}")


def _section(report: ServingReport) -> str:
    columns = ("mean", "p50", "p90", "p99")
    found = {name: report.percentiles(name) for name in report.series}
    rows = [
        (f"{name}, ms", *(f"{values.get(column, float('nan')):.1f}" for column in columns))
        for name, values in found.items()
    ]
    plots = "".join(_figure(name, values) for name, values in report.series.items() if values)
    summary = escape(str(report).split("\n  milliseconds")[0])
    return f"<h2>{escape(report.name)}</h2><pre>{summary}</pre>{table(rows, ('', *columns))}{plots}"


def _figure(name: str, values: Sequence[float]) -> str:
    """The share of requests (or gaps) below each time."""
    ordered = np.sort(values)
    points = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), 200)).astype(int))
    most = float(ordered[-1]) or 1.0
    x = _LEFT + (_WIDTH - _LEFT - 10) * ordered[points] / most
    y = _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 10) * (points + 1) / len(ordered)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    base = _HEIGHT - _BOTTOM
    axes = f"<path class='axis' d='M{_LEFT} 10V{base}H{_WIDTH - 10}' fill='none'/>"
    for share in (0, 0.5, 0.9, 1):
        height = base - (base - 10) * share
        axes += f"<text x='4' y='{height + 4:.0f}'>{share:.0%}</text>"
        axes += f"<path class='axis' d='M{_LEFT - 4} {height:.0f}h4'/>"
    for share in (0, 0.5, 1):
        place = _LEFT + (_WIDTH - _LEFT - 10) * share
        anchor = ("start", "middle", "end")[int(2 * share)]
        axes += f"<text x='{place:.0f}' y='{_HEIGHT - 8}' text-anchor='{anchor}'>{most * share:.0f} ms</text>"
    drawing = f"<svg width='{_WIDTH}' height='{_HEIGHT}'>{axes}<polyline class='line' points='{line}'/></svg>"
    return f"<figure>{drawing}<figcaption>{name}: share below</figcaption></figure>"
