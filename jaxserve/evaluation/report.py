"""What a job's results say: scores with intervals, and how models or runs differ on the same items."""

from collections.abc import Sequence
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve.evaluation.metrics import LOWER_IS_BETTER, total_of
from jaxserve.evaluation.results import read_results
from jaxserve.evaluation.statistics import bootstrap, paired

Lines = Sequence[dict[str, Any]]


class Run(NamedTuple):
    """The results of one task by one model."""

    task: str
    model: str
    lines: Lines
    file: str


def build_report(runs: Sequence[Run], *, samples: int, seed: int) -> dict[str, Any]:
    """As JSON has it: for each task the scores of each run, and every two runs compared."""
    tasks = []
    for name, group in groupby(sorted(runs, key=lambda run: run.task), key=lambda run: run.task):
        mine = list(group)
        results = [_scores(run, samples, seed) for run in mine]
        pairs = [compared(a, b, samples=samples, seed=seed) for a, b in combinations(mine, 2)]
        tasks.append({"task": name, "results": results, "comparisons": pairs})
    order = {run.task: place for place, run in reversed(list(enumerate(runs)))}
    return {"bootstrap": samples, "seed": seed, "tasks": sorted(tasks, key=lambda task: order[task["task"]])}


def _scores(run: Run, samples: int, seed: int) -> dict[str, Any]:
    good = [line for line in run.lines if "error" not in line]
    metrics = {}
    for name in good[0]["vectors"] if good else ():
        found = bootstrap(_vectors(good, name), total_of(name), samples=samples, seed=seed)
        metrics[name] = {"value": found.value, "low": found.low, "high": found.high}
    sizes = {
        name: sum(line[name] for line in good)
        for name in ("num_prompt_tokens", "num_output_tokens", "num_scored_tokens")
        if good and name in good[0]
    }
    failed = len(run.lines) - len(good)
    items = {"num_items": len(run.lines), "num_failed": failed}
    return {"model": run.model, "file": run.file, **items, "metrics": metrics, **sizes}


def _vectors(lines: Lines, metric: str) -> np.ndarray:
    return np.array([line["vectors"][metric] for line in lines], np.float64)


def compared(a: Run, b: Run, *, samples: int, seed: int) -> dict[str, Any]:
    """B against A on the items that both have answered. ValueError where those are not the same."""
    pairs = _paired_lines(a, b)
    both = [(x, y) for x, y in pairs if "error" not in x and "error" not in y]
    left, right = [x for x, _ in both], [y for _, y in both]
    metrics = {}
    for name in left[0]["vectors"] if left else ():
        if name not in right[0]["vectors"]:
            continue
        found = paired(_vectors(left, name), _vectors(right, name), total_of(name), samples=samples, seed=seed)
        ends = {"a": float(total_of(name)(_vectors(left, name).sum(0))), "b": None}
        ends["b"] = ends["a"] + found.value
        metrics[name] = {**ends, **found._asdict()}
    return {
        "a": a.model,
        "b": b.model,
        "num_items": len(both),
        "num_failed": len(pairs) - len(both),
        "num_predictions_different": sum(x.get("prediction") != y.get("prediction") for x, y in both),
        "num_outputs_different": sum(_said(x) != _said(y) for x, y in both),
        "max_logprob_difference": max((_logprob_difference(x, y) for x, y in both), default=0.0),
        "metrics": metrics,
    }


def _paired_lines(a: Run, b: Run) -> list[tuple[dict, dict]]:
    known = {line["item"]: line for line in b.lines}
    pairs = []
    for line in a.lines:
        other = known.pop(line["item"], None)
        if other is None or other["prompt_sha256"] != line["prompt_sha256"]:
            what = "is missing" if other is None else "has another prompt"
            raise ValueError(f"{b.file}: item {line['item']} {what}: {a.file} cannot be compared with it")
        pairs.append((line, other))
    if known:
        raise ValueError(f"{a.file}: item {min(known)} is missing: {b.file} cannot be compared with it")
    return pairs


def _said(line: dict[str, Any]) -> Any:
    """Everything that the model itself gave: a text, or log-probabilities."""
    return line.get("output", line.get("logprobs", line.get("logprob")))


def _logprob_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest of an item's log-likelihoods."""
    if "logprobs" not in a and "logprob" not in a:
        return 0.0
    ends = [np.atleast_1d(line.get("logprobs", line.get("logprob"))) for line in (a, b)]
    return float(np.abs(ends[0] - ends[1]).max())


# ---- two runs from their files ----------------------------------------------------------------------------


def compare_paths(a: str | Path, b: str | Path, *, samples: int = 1000, seed: int = 0) -> tuple[dict, list[Run]]:
    """The report on two runs: result files, or folders with the results of a model or a job."""
    left, right = _runs_below(Path(a)), _runs_below(Path(b))
    names = [name for name in left if name in right]
    if not names:
        raise ValueError(f"{b}: it holds no results of the tasks that {a} has ({', '.join(left)})")
    runs = []
    for name in names:
        first, second = left[name], right[name]
        same = first.model == second.model
        for run, path, mark in ((first, a, "A"), (second, b, "B")):
            runs.append(run._replace(model=f"{mark}: {path if same else run.model}"))
    return build_report(runs, samples=samples, seed=seed), runs


def _runs_below(path: Path) -> dict[str, Run]:
    """The results at a path by task, or by model/task where there are several models."""
    if path.is_file():
        return {path.stem: Run(path.stem, path.parent.name, read_results(path), str(path))}
    files = sorted(path.rglob("*.jsonl"))
    if not files:
        raise ValueError(f"{path}: it holds no result files (TASK.jsonl)")
    several = len({file.parent for file in files}) > 1
    found = {}
    for file in files:
        name = file.relative_to(path).with_suffix("").as_posix() if several else file.stem
        found[name] = Run(name, file.parent.name, read_results(file), str(file))
    return found


# ---- as text ----------------------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    """Tables for the terminal."""
    lines = []
    for task in report["tasks"]:
        lines.append(task["task"])
        for result in task["results"]:
            failed = f", {result['num_failed']} failed" if result["num_failed"] else ""
            lines.append(f"  {result['model']} ({result['num_items']} items{failed})")
            for name, found in result["metrics"].items():
                lines.append(f"    {name:<20} {found['value']:9.4f}  [{found['low']:.4f}, {found['high']:.4f}]")
        for pair in task["comparisons"]:
            lines.append(f"  {pair['b']} against {pair['a']} ({pair['num_items']} items)")
            for name, found in pair["metrics"].items():
                interval = f"[{found['low']:+.4f}, {found['high']:+.4f}]"
                lines.append(f"    {name:<20} {found['value']:+9.4f}  {interval}  {verdict(name, found)}")
            lines.append(f"    {difference_of_answers(pair)}")
    return "\n".join(lines)


def verdict(metric: str, found: dict[str, Any]) -> str:
    """What a paired difference says at the 5 % level."""
    p = f"p = {found['p_value']:.4f}"
    if found["p_value"] >= 0.05:
        return f"{p}: no difference shown"
    return f"{p}: B is {'better' if (found['value'] > 0) != (metric in LOWER_IS_BETTER) else 'worse'}"


def difference_of_answers(pair: dict[str, Any]) -> str:
    said = f"{pair['num_outputs_different']} of {pair['num_items']} outputs differ"
    if pair["max_logprob_difference"]:
        said += f", log-likelihoods by up to {pair['max_logprob_difference']:.3g}"
    return f"{said}; {pair['num_predictions_different']} predictions differ"
