"""docs/EVALUATION.md and the example jobs: commands parse, jobs load, and the examples' data are what they say."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from jaxserve.cli import main
from jaxserve.evaluation import batch
from jaxserve.evaluation.config import load_job
from jaxserve.evaluation.tasks import Task

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "EVALUATION.md").read_text()
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


def test_the_arithmetic_is_right():
    """Every step of every solution, and the answer is the last one's."""
    for line in (ROOT / "configs" / "evaluation" / "arithmetic.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        steps = re.findall(r"((?:\d+ [-+*/] )+\d+) = (\d+)", answer)
        assert steps
        assert all(eval(left) == int(right) for left, right in steps), answer
        assert int(answer.split("####")[1]) in [int(right) for _, right in steps][-2:], answer
