"""docs/EVALUATION.md and the example jobs: commands parse, jobs load, and the examples' data are what they say."""

import hashlib
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from cli_tools import run

from jaxserve.cli import main
from jaxserve.evaluation import batch
from jaxserve.evaluation.config import load_job
from jaxserve.evaluation.tasks import Task

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "EVALUATION.md").read_text()
SMALL = ("--engine.max_num_seqs", 4, "--engine.max_num_batched_tokens", 64)  # fewer programs to compile
CONFIGS = sorted((ROOT / "configs" / "evaluation").glob("*.yaml"))


def blocks(language):
    return [
        text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if kind == language
    ]


def test_commands(monkeypatch, tmp_path, capsys):
    """Each runs to where an engine would be started, or as far as its files go."""

    def started(*_, **__):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("jaxserve.evaluation.job.LocalExecutor", started)
    monkeypatch.setattr(batch, "_computed", started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "gsm8k_test.jsonl").write_bytes((ROOT / "configs/evaluation/arithmetic.jsonl").read_bytes())
    (tmp_path / "requests.jsonl").write_text("".join(blocks("json")))
    lines = [line for block in blocks("") for line in block.splitlines()]
    commands = [line.removeprefix(".venv/bin/jaxserve ") for line in lines if line.startswith(".venv/bin/jaxserve ")]
    assert len(commands) == len(lines) - 1 == 6
    for command in commands:
        arguments = shlex.split(command)
        if "compare" in arguments:
            assert main(arguments) == 1
            assert "it holds no result files" in capsys.readouterr().err
            continue
        with pytest.raises(AssertionError, match="an engine was started"):
            main(arguments)


def test_the_request_is_one(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(blocks("json")))
    [line] = batch.read_batch(tmp_path / "in.jsonl")
    assert line.error is None


def test_the_job(tmp_path, monkeypatch):
    (tmp_path / "math_scores.py").write_text("def close(found, target, line):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    [text] = blocks("yaml")
    (tmp_path / "job.yaml").write_text(text)
    job = load_job(tmp_path / "job.yaml", {"data": {"arithmetic": str(ROOT / "configs/evaluation/arithmetic.jsonl")}})
    assert [model.engine.dtype for model in job.models] == ["float32", "bfloat16"]
    assert len(Task(job.tasks[0], job).items) == 20
    named = set(re.findall(r"^\s+(?:- )?(\w+):", text, re.MULTILINE))
    table = PAGE[PAGE.index("| field |") :]
    assert {name for name in named if f"`{name}" not in table} <= {"name", "labels"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_example_jobs(config):
    job = load_job(config)
    tasks = {task.name: Task(task, job) for task in job.tasks}
    sizes = {"arithmetic": 20, "multiple_choice": 20, "passages": 6}
    assert {name: len(task.items) for name, task in tasks.items()} == {name: sizes[name] for name in tasks}
    assert yaml.safe_load(config.read_text())["output"] == f"results/{config.stem}"


@pytest.mark.slow  # the demo model, four times
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_example_jobs_run(config, tmp_path, capsys):
    status, _, err = run(capsys, "eval", config, "--limit", 2, "--output", tmp_path, *SMALL)
    assert status == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    job = load_job(config)
    assert [task["task"] for task in report["tasks"]] == [task.name for task in job.tasks]
    for task in report["tasks"]:
        assert [result["model"] for result in task["results"]] == [model.name for model in job.models]
        for result in task["results"]:
            assert (result["num_items"], result["num_failed"]) == (2, 0)
            assert all(0 <= found["value"] < math.inf for found in result["metrics"].values())
    assert (tmp_path / "report.html").stat().st_size > 0


@pytest.mark.slow  # the demo model
def test_the_arithmetic_job_takes_another_file(tmp_path, capsys):
    """Of GSM8K's form: calculations in double angle brackets, thousands with commas, the answer behind four hashes."""
    rows = [
        ("A box holds 6 eggs. How many eggs are in 7 boxes?", "There are 6*7=<<6*7=42>>42 eggs.\n#### 42"),
        ("Ann has $10 and spends $4.\nWhat is left?", "She has $10-$4=$<<10-4=6>>6.\nThat is all.\n#### 6"),
        ("A hall has 40 rows of 50 seats. How many?", "It has 40*50=<<40*50=2000>>2000 seats.\n#### 2,000"),
    ]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    config = ROOT / "configs" / "evaluation" / "arithmetic.yaml"
    status, _, err = run(capsys, "eval", config, "--data", data, "--output", tmp_path / "results", *SMALL)
    assert status == 0, err
    [file] = (tmp_path / "results").rglob("arithmetic.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["target"] for line in lines] == ["42", "6", "2,000"]
    job = load_job(config, {"data": {"arithmetic": str(data)}})
    for line, item, (question, _) in zip(lines, Task(job.tasks[0], job).items, rows, strict=True):
        asked = f"Question: {question}\nAnswer:"
        others = [f"Question: {q}\nAnswer: {a.replace('####', 'The answer is')}\n\n" for q, a in rows if q != question]
        assert item.prompt in ("".join([*others, asked]), "".join([*others[::-1], asked]))
        assert line["prompt_sha256"] == hashlib.sha256(item.prompt.encode()).hexdigest()
        assert line["num_output_tokens"] > 0
    [task] = json.loads((tmp_path / "results" / "report.json").read_text())["tasks"]
    right = [(line["prediction"] or "").strip() == line["target"] for line in lines]
    assert task["results"][0]["metrics"]["accuracy"]["value"] == pytest.approx(sum(right) / 3)


def test_the_arithmetic_is_right():
    """Every step of every solution, and the answer is the last one's."""
    for line in (ROOT / "configs" / "evaluation" / "arithmetic.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        steps = re.findall(r"((?:\d+ [-+*/] )+\d+) = (\d+)", answer)
        assert steps
        assert all(eval(left) == int(right) for left, right in steps), answer
        assert int(answer.split("####")[1]) in [int(right) for _, right in steps][-2:], answer
