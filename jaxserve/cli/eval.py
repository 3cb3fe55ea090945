"""`jaxserve eval`: run an evaluation job, or compare the results of two runs."""

import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from jaxserve.validation import require

OWN = ("job", "output", "data", "limit", "engine", "overwrite", "progress", "samples", "seed")
ANY_NUMBER = "CONFIG.yaml, or `compare A B` for two result files or folders"


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("job", nargs="+", type=str, help=ANY_NUMBER)
    add("--output", type=str, help="the folder of the results; with compare, the folder for the report")
    add("--data", type=str, help="a file in place of the task's: PATH, or TASK=PATH,TASK=PATH for several tasks")
    add("--limit", type=int, help="the first so many items of each task")
    add("--engine", type=dict[str, Any], help="engine options for all models, as a dict or one by one")
    add("--overwrite", action="store_true", help="start over, where results of another job are in the way")
    add("--progress", type=bool, help="a progress bar; only on a terminal unless it is said")
    add("--samples", type=int, default=1000, help="compare: resamples for the intervals")
    add("--seed", type=int, default=0, help="compare: of the resamples and swaps")


def run(options: Namespace) -> int:
    if options.job[0] == "compare":
        return _compare(options)
    if len(options.job) > 1:
        raise ValueError(f"job={options.job!r}: it must be {ANY_NUMBER}")
    from jaxserve.evaluation.config import load_job
    from jaxserve.evaluation.job import Job
    from jaxserve.evaluation.report import as_text

    sys.path.insert(0, str(Path(options.job[0]).parent.absolute()))  # where a job's own metrics may be
    overrides = {"output": options.output, "limit": options.limit, "data": _data(options.data)}
    config = load_job(options.job[0], overrides | {"engine": options.engine or {}})
    with Job(config, overwrite=options.overwrite) as job:
        report = job.run(use_tqdm=options.progress)
    print(as_text(report))
    print(f"{Path(config.output) / 'report.html'}", file=sys.stderr)
    return 1 if any(result["num_failed"] for task in report["tasks"] for result in task["results"]) else 0


def _data(given: str | None) -> str | dict[str, str] | None:
    """One path, or paths by task."""
    if given is None or "=" not in given:
        return given
    parts = given.split(",")
    require(all("=" in part for part in parts), "data", given, "one path, or TASK=PATH for each task")
    return dict(part.split("=", 1) for part in parts)


def _compare(options: Namespace) -> int:
    from jaxserve.evaluation.html_report import write_report
    from jaxserve.evaluation.report import as_text, compare_paths

    if len(options.job) != 3:
        raise ValueError(f"compare: {len(options.job) - 1} given: two results must be named, A and B")
    require(options.samples >= 1, "samples", options.samples, "an integer of at least 1")
    require(options.seed >= 0, "seed", options.seed, "an integer of at least 0")
    report, runs = compare_paths(*options.job[1:], samples=options.samples, seed=options.seed)
    print(as_text(report))
    if options.output:
        write_report(Path(options.output), "compare", report, runs)
    return 0
