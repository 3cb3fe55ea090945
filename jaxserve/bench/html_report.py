"""An HTML page with the figures of `jaxserve bench serve` and plots drawn as SVG: one file, nothing to load."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from jaxserve.bench.serving import ServingReport

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 220, 44, 28
_STYLE = """body{font:15px system-ui,sans-serif;max-width:960px;margin:2em auto;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{margin:.5em}.line{fill:none;stroke:#2463a6;stroke-width:1.8}
.axis{stroke:#888}text{font-size:11px;fill:#444}figure{display:inline-block;margin:0}figcaption{text-align:center}"""


def page(reports: Sequence[ServingReport], settings: dict[str, Any]) -> str:
    """The whole document. `settings` say what was run."""
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in settings.items()
    )
    body = "".join(_section(report) for report in reports)
    head = f"<meta charset='utf-8'><title>jaxserve bench serve</title><style>{_STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body><h1>Serving</h1><table>{rows}</table>{body}</body></html>\n"


def _section(report: ServingReport) -> str:
    columns = ("mean", "p50", "p90", "p99")
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = ""
    for name in report.series:
        found = report.percentiles(name)
        rows += (
            f"<tr><td>{name}, ms</td>"
            + "".join(f"<td>{found.get(c, float('nan')):.1f}</td>" for c in columns)
            + "</tr>"
        )
    plots = "".join(_figure(name, values) for name, values in report.series.items() if values)
    summary = escape(str(report).split("\n  milliseconds")[0])
    return f"<h2>{escape(report.name)}</h2><pre>{summary}</pre><table><tr><th></th>{head}</tr>{rows}</table>{plots}"


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
