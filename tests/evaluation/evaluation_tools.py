"""What the tests of evaluation jobs share: a tiny model's job on disk, and result files without their times."""

import json
from pathlib import Path
from typing import Any

import yaml
from checkpoint_tools import SHAPES

from jaxserve.evaluation.config import load_job
from jaxserve.evaluation.job import Job

ENGINE = SHAPES  # their programs are compiled for other tests too

GENERATE = {
    "name": "adding",
    "kind": "generate",
    "data": "adding.jsonl",
    "prompt": "{{ a }} + {{ b }} =",
    "target": "{{ a + b }}",
    "sampling": {"max_tokens": 12, "ignore_eos": True},
    "postprocess": "number",
    "metrics": ["accuracy", "contains"],
}
CHOICE = {
    "name": "choosing",
    "kind": "multiple_choice",
    "data": "choosing.jsonl",
    "prompt": "Q: {{ q }} A:",
    "choices": "options",
    "target": "{{ right }}",
    "fewshot": {"num": 2, "separator": "\n"},
    "metrics": ["accuracy", "accuracy_per_byte", "accuracy_per_token"],
}
LABELS = {
    "name": "labelling",
    "kind": "classification",
    "data": "labelling.csv",
    "prompt": "{{ text }} is",
    "labels": ["good", "bad", "so so"],
    "target": "{{ label }}",
    "metrics": ["accuracy", "macro_f1"],
}
TEXTS = {
    "name": "texts",
    "kind": "perplexity",
    "data": "texts.jsonl",
    "prompt": "{{ text }}",
    "window": 24,
    "stride": 8,
    "metrics": ["perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"],
}


def write_data(folder: Path) -> None:
    """The data files of the tasks above."""
    rows = {
        "adding": [{"a": n, "b": 3 * n % 7} for n in range(12)],
        "choosing": [
            {"q": f"number {n}", "options": ["one", "two and two", "ten", "no"][: 2 + n % 3], "right": n % 2}
            for n in range(10)
        ],
        "texts": [{"text": "The cat sat on the mat, and the dog lay by the door. " * (1 + n % 2)} for n in range(4)],
    }
    for name, values in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    labels = ["good", "bad", "so so"]
    lines = [f'"tea, number {n}",{labels[n * n % 3]}' for n in range(7)]
    (folder / "labelling.csv").write_text("text,label\n" + "\n".join(lines) + "\n")


def write_job(folder: Path, model: Path, *tasks: dict, **fields: Any) -> Path:
    """A job's file in `folder`, with its data; returns its path."""
    write_data(folder)
    job = {"engine": {"model": str(model), **ENGINE}, "output": str(folder / "results"), "seed": 3, "bootstrap": 200}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**job, **fields, "tasks": list(tasks)}, sort_keys=False))
    return path


def run_job(path: Path, overwrite: bool = False, **overrides: Any) -> dict[str, Any]:
    """Run it in this process; returns the report."""
    with Job(load_job(path, overrides), overwrite=overwrite) as job:
        return job.run(use_tqdm=False)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(path: Path) -> list[str]:
    """The lines as they are written, but for their times."""
    lines = lines_of(path)
    for line in lines:
        del line["time"]
    return [json.dumps(line, ensure_ascii=False) for line in lines]
