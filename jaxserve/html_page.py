"""What the HTML reports share: one file with nothing to load, plots drawn as SVG."""

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """body{font:15px system-ui,sans-serif;max-width:960px;margin:2em auto;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{margin:.5em}.line{fill:none;stroke:#2463a6;stroke-width:1.8}
.axis{stroke:#888}text{font-size:11px;fill:#444}figure{display:inline-block;margin:0}figcaption{text-align:center}"""


def document(title: str, body: str, *, style: str = "") -> str:
    """The whole page; `body` is HTML."""
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}{style}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>\n"


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> str:
    """A table of plain texts."""
    head = "".join(f"<th>{escape(str(name))}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"
