"""The HTML page of a report: scores with intervals, plots, comparisons, and every item's answers to look through."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.evaluation.report import Run, difference_of_answers, verdict
from jaxserve.html_page import document, table

_WIDTH, _ROW, _LEFT = 640, 22, 250
WRONG_SHOWN = 5
_STYLE = """details{border-bottom:1px solid #ddd;padding:.3em 0}summary{cursor:pointer}
pre{white-space:pre-wrap;background:#f5f5f5;padding:.5em;margin:.3em 0}.right{color:#18794e}.wrong{color:#b3261e}
.bar{fill:#9db9d9}.whisker{stroke:#222;stroke-width:1.4}.filters{margin:1em 0}"""
_SCRIPT = """document.querySelectorAll('.items').forEach(box=>{
const show=()=>{const kind=box.querySelector('select').value,text=box.querySelector('input').value.toLowerCase();
box.querySelectorAll('details').forEach(d=>{const fits=kind=='all'||d.classList.contains(kind);
d.hidden=!(fits&&(!text||d.textContent.toLowerCase().includes(text)))})};
box.querySelector('select').onchange=show;box.querySelector('input').oninput=show})"""


def write_report(folder: Path, name: str, report: dict[str, Any], runs: Sequence[Run]) -> None:
    """The report as NAME.json and as NAME.html."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.html").write_text(page(report, runs), encoding="utf-8", errors="replace")


def page(report: dict[str, Any], runs: Sequence[Run]) -> str:
    """The whole document for a report and the lines that it was made from."""
    sections = "".join(_section(task, [run for run in runs if run.task == task["task"]]) for task in report["tasks"])
    note = f"Intervals are of 95 %, from {report['bootstrap']} resamples of the items."
    body = f"<h1>Evaluation</h1><p>{note}</p>{sections}<script>{_SCRIPT}</script>"
    return document("jaxserve eval", body, style=_STYLE)


def _section(task: dict[str, Any], runs: list[Run]) -> str:
    rows = []
    for result in task["results"]:
        for name, found in result["metrics"].items():
            interval = f"{found['low']:.4f} to {found['high']:.4f}"
            rows.append((result["model"], name, f"{found['value']:.4f}", interval, _count(result)))
    scores = table(rows, ("model", "metric", "value", "interval", "items"))
    plots = "".join(_interval_plot(name, task["results"]) for name in _metrics(task))
    plots += "".join(_histogram(run) for run in runs)
    comparisons = "".join(_comparison(pair) for pair in task["comparisons"])
    return f"<h2>{escape(task['task'])}</h2>{scores}{plots}{comparisons}{_wrong_ones(runs)}{_items(runs)}"


def _metrics(task: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for result in task["results"] for name in result["metrics"]))


def _count(result: dict[str, Any]) -> str:
    return f"{result['num_items']}" + (f" ({result['num_failed']} failed)" if result["num_failed"] else "")


def _comparison(pair: dict[str, Any]) -> str:
    rows = [
        (name, f"{f['a']:.4f}", f"{f['b']:.4f}", f"{f['value']:+.4f}", f"{f['low']:+.4f} to {f['high']:+.4f}",
         verdict(name, f))
        for name, f in pair["metrics"].items()
    ]  # fmt: skip
    title = f"<h3>B: {escape(pair['b'])} against A: {escape(pair['a'])}</h3>"
    return f"{title}{table(rows, ('', 'A', 'B', 'B - A', 'interval', ''))}<p>{difference_of_answers(pair)}.</p>"


# ---- plots ------------------------------------------------------------------------------------------------


def _interval_plot(metric: str, results: list[dict[str, Any]]) -> str:
    """A bar and its interval for each model."""
    found = [(result["model"], result["metrics"][metric]) for result in results if metric in result["metrics"]]
    most = max([value["high"] for _, value in found] + [1e-9])
    place = lambda value: _LEFT + (_WIDTH - _LEFT - 10) * max(value, 0) / most
    drawing = ""
    for row, (model, value) in enumerate(found):
        top = row * _ROW + 4
        middle = top + (_ROW - 8) / 2
        drawing += f"<text x='0' y='{middle + 4:.0f}'>{escape(model[-40:])}</text>"
        drawing += f"<rect class='bar' x='{_LEFT}' y='{top}' height='{_ROW - 8}'"
        drawing += f" width='{place(value['value']) - _LEFT:.1f}'/>"
        low, high = place(value["low"]), place(value["high"])
        drawing += (
            f"<path class='whisker' d='M{low:.1f} {middle}H{high:.1f}M{low:.1f} {top + 2}v10M{high:.1f} {top + 2}v10'/>"
        )
    svg = f"<svg width='{_WIDTH}' height='{len(found) * _ROW + 4}'>{drawing}</svg>"
    return f"<figure>{svg}<figcaption>{escape(metric)}, 0 to {most:.4g}</figcaption></figure>"


def _histogram(run: Run) -> str:
    """How long answers are, how clear choices are, or how likely texts are."""
    good = [line for line in run.lines if "error" not in line]
    if good and "num_output_tokens" in good[0]:
        name, values = "output tokens", [line["num_output_tokens"] for line in good]
    elif good and "logprobs" in good[0]:
        name = "lead of the best answer over the second, nats"
        values = [float(np.diff(np.sort(line["logprobs"])[-2:])[0]) for line in good]
    elif good:
        name = "nats per token"
        values = [-line["logprob"] / line["num_scored_tokens"] for line in good]
    else:
        return ""
    counts, edges = np.histogram(values, bins=min(20, max(len(values), 1)))
    width, height = 300 / len(counts), 80
    bars = "".join(
        f"<rect class='bar' x='{place * width:.1f}' y='{height - height * count / max(counts.max(), 1):.1f}'"
        f" width='{width - 1:.1f}' height='{height * count / max(counts.max(), 1):.1f}'/>"
        for place, count in enumerate(counts)
    )
    ends = f"<text x='0' y='94'>{edges[0]:.3g}</text><text x='300' y='94' text-anchor='end'>{edges[-1]:.3g}</text>"
    svg = f"<svg width='300' height='98'>{bars}{ends}</svg>"
    return f"<figure>{svg}<figcaption>{escape(run.model)}: {name}</figcaption></figure>"


# ---- items ------------------------------------------------------------------------------------------------


def _main_score(line: dict[str, Any]) -> float | None:
    """1 for right and 0 for wrong by the first metric that goes from 0 to 1; None where there is none."""
    if "error" in line:
        return 0.0
    if "prediction" not in line:
        return None
    return next((value for name, value in line["scores"].items() if name not in ("bleu", "macro_f1")), None)


def _state(score: float | None) -> str:
    return "" if score is None else "right" if score >= 1 else "wrong"


def _wrong_ones(runs: list[Run]) -> str:
    """Samples of wrong answers, for each model."""
    found = ""
    for run in runs:
        wrong = [line for line in run.lines if _state(_main_score(line)) == "wrong"][:WRONG_SHOWN]
        if wrong:
            found += f"<h3>Wrong answers of {escape(run.model)}</h3>"
            found += "".join(_details([(run.model, line)]) for line in wrong)
    return found


def _items(runs: list[Run]) -> str:
    options = "".join(f"<option>{kind}</option>" for kind in ("all", "wrong", "right", "different"))
    filters = f"<div class='filters'><select>{options}</select> <input placeholder='search'></div>"
    columns = zip(*([(run.model, line) for line in run.lines] for run in runs), strict=False)
    return f"<h3>Items</h3><div class='items'>{filters}{''.join(_details(list(column)) for column in columns)}</div>"


def _details(column: list[tuple[str, dict[str, Any]]]) -> str:
    """One item and what each model made of it."""
    first = column[0][1]
    states = [_state(_main_score(line)) for _, line in column]
    kinds = {state for state in states if state} | ({"different"} if len(set(states)) > 1 else set())
    marks = "".join(f" <span class='{state}'>{'✓' if state == 'right' else '✗'}</span>" for state in states if state)
    body = f"<pre>{escape(first['prompt'])}</pre>"
    if "target" in first:
        body += f"<p>Target: <b>{escape(str(first['target']))}</b></p>"
    for model, line in column:
        body += f"<p>{escape(model)}: {escape(_summary(line))}</p>"
        body += f"<pre>{escape(line['output'])}</pre>" if "output" in line else ""
        if "choices" in line and "logprobs" in line:
            sizes = zip(line["choices"], line["logprobs"], line["num_tokens"], strict=True)
            body += table([(c, f"{v:.3f}", n) for c, v, n in sizes], ("answer", "log-likelihood", "tokens"))
    title = escape(" ".join(first["prompt"].split())[:90])
    return (
        f"<details class='{' '.join(sorted(kinds))}'><summary>{first['item']}{marks} {title}</summary>{body}</details>"
    )


def _summary(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"failed: {line['error']}"
    scores = ", ".join(f"{name} {value:.4g}" for name, value in line["scores"].items())
    prediction = f"{line['prediction']!r}; " if "prediction" in line else ""
    return prediction + scores
