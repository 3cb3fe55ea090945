"""Wrong jobs and wrong data: errors that name file, line and field, before a model is loaded."""

import json
import re
import sys

import pytest
import yaml
from cli_tools import run
from evaluation_tools import CHOICE, GENERATE, LABELS, TEXTS, write_job

from jaxserve import extras
from jaxserve.evaluation.config import load_job
from jaxserve.evaluation.job import Job
from jaxserve.evaluation.templates import render


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    """Fails the test if an engine is started."""

    def started(*_, **__):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("jaxserve.evaluation.job.LocalExecutor", started)
    monkeypatch.setattr("jaxserve.evaluation.job.RayExecutor", started)


TEXT = """\
engine:
  max_model_len: 64
output: results
tasks:
  - name: adding
    kind: generate
    data: adding.jsonl
    prompt: "{{ a }} + {{ b }} ="
    target: "{{ a + b }}"
    metrics: [accuracy]
    sampling:
      max_tokens: 4
"""


def refusal(path):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the caller looks at it)
        Job(load_job(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "line", "parts"),
    [
        ("kind: generate", "kind: generat", 6, ["tasks[0].kind", "kind='generat'", "multiple_choice"]),
        ("name: adding", "name: a b", 5, ["tasks[0].name", "name='a b'"]),
        ("metrics: [accuracy]", "metrics: [acuracy]", 10, ["tasks[0].metrics", "'acuracy'", "exact_match"]),
        ("metrics: [accuracy]", "metrics: [perplexity]", 10, ["'perplexity'", "kind='generate'"]),
        ("metrics: [accuracy]", "metrics: [{function: 'nowhere:f'}]", 10, ["'nowhere:f'", "No module named"]),
        ("metrics: [accuracy]", "metrics: [{function: 'math:f'}]", 10, ["'math:f'"]),
        ("metrics: [accuracy]", "metrics: [accuracy, accuracy]", 10, ["different names"]),
        ("metrics: [accuracy]", "metric: [accuracy]", 10, ["no field 'metric'", "did you mean 'metrics'"]),
        ("{{ a + b }}", "{{ a + b", 9, ["tasks[0].target", "target: line 1 of the template"]),
        ("max_tokens: 4", "max_tokens: -4", 11, ["max_tokens=-4"]),
        ("max_tokens: 4", "max_token: 4", 11, ["no field 'max_token'", "did you mean 'max_tokens'"]),
        ("max_tokens: 4", "n: 2", 11, ["without n"]),
        ("max_model_len: 64", "max_model_le: 64", 2, ["no field 'max_model_le'"]),
        ("max_model_len: 64", "dtype: float", 2, ["engine.dtype", "did you mean 'float32'"]),
        ("output: results", "outputs: results", 3, ["outputs: unknown field"]),
        ("output: results", "output: 3", 3, ["output=3"]),
        ("output: results", "seed: -1", 3, ["seed=-1"]),
        ("output: results", "executor: spark", 3, ["executor='spark'", "local, ray"]),
        ("data: adding.jsonl", "data: {split: train}", 7, ["tasks[0].data", "path: a file must be given"]),
        ("data: adding.jsonl", "labels: [a, b]", 5, ["tasks[0]", "data"]),
        ("data: adding.jsonl", "data: adding.jsonl\n    choices: [a, b]", 8, ["choices: it must be left out"]),
        ('target: "{{ a + b }}"', "chat: 1", 9, ["chat=1"]),
        ('target: "{{ a + b }}"', "limit: 3", 5, ["target: kind='generate' must have it"]),
        ("    sampling:", "    postprocess: num\n    sampling:", 11, ["postprocess='num'"]),
        ("    sampling:", "    fewshot: {num: -1}\n    sampling:", 11, ["fewshot", "num=-1"]),
        ("    sampling:", "    system: Hello\n    sampling:", 11, ["system='Hello'", "left out unless chat"]),
        ("tasks:", "tasks: [", 5, ["no YAML"]),
        ("tasks:", "models: []\ntasks:", 4, ["models=[]"]),
        ("tasks:", "models: [{name: a b}]\ntasks:", 4, ["name='a b'"]),
        ("tasks:", "models: [{name: x}, {name: x}]\ntasks:", 4, ["different names"]),
    ],
)
def test_wrong_jobs(tmp_path, old, new, line, parts):
    write_job(tmp_path, tmp_path, GENERATE)
    path = tmp_path / "job.yaml"
    assert TEXT.count(old) == 1
    path.write_text(TEXT.replace(old, new))
    message = refusal(path)
    assert message.startswith(f"{path}: line {line}: "), message
    assert [part for part in parts if part not in message] == [], message


def test_the_job_itself_is_right(tmp_path):
    write_job(tmp_path, tmp_path, GENERATE, CHOICE, LABELS, TEXTS).write_text(TEXT)
    with Job(load_job(tmp_path / "job.yaml")) as job:
        assert job.num_missing == 12
    assert load_job(tmp_path / "job.yaml").models[0].engine.max_model_len == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1, "b": 2}\n{"a": 1 "b"}\n', "adding.jsonl: line 2: no JSON: "),
        ('{"a": 1, "b": 2}\n\n[1]\n', "adding.jsonl: line 3: it must hold an object, not list"),
        ('{"a": 1, "b": 2}\n{"a": 1}\n', r"adding.jsonl: line 2: task adding: prompt: 'b' is undefined .*\(.*has a\)"),
        ('{"a": 1, "b": 2}\n{"a": 1, "b": "x"}\n', "adding.jsonl: line 2: task adding: target: unsupported operand"),
        ("\n", "adding.jsonl: it holds no lines"),
        (None, "adding.jsonl: there is no such file"),
        (b"\xff\xfe", "adding.jsonl: not UTF-8"),
    ],
)
def test_wrong_data(tmp_path, content, message):
    path, data = write_job(tmp_path, tmp_path, GENERATE), tmp_path / "adding.jsonl"
    data.unlink() if content is None else data.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert re.search(message, refusal(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "{{ q }}"}, r"line \d: task choosing: target='number \d': target must be a letter from A to B"),
        ({"target": "2"}, r"line \d: task choosing: target='2': target must be a letter from A to B or a number"),
        ({"choices": "option"}, r"line \d: task choosing: choices: 'option' is undefined"),
        ({"choices": "q"}, r"line \d: task choosing: choices='number \d': choices must be two texts or more"),
        ({"choices": "options +"}, "job.yaml: line .*: tasks.0..choices: choices: "),
        ({"prompt": "{{ '' }}"}, r"line \d: task choosing: prompt: it is empty"),
        ({"fewshot": {"num": 10}}, "task choosing: fewshot.num=10: there are 10 data lines"),
        ({"fewshot": {"num": 1, "target": "{{ x }}"}}, "task choosing: fewshot.target: 'x' is undefined"),
    ],
)
def test_wrong_choices(tmp_path, changes, message):
    path = write_job(tmp_path, tmp_path, {**CHOICE, **changes})
    assert re.search(message, refusal(path)), refusal(path)


def test_a_label_that_is_none(tmp_path):
    path = write_job(tmp_path, tmp_path, {**LABELS, "labels": ["good", "so so"]})
    assert re.search("labelling.csv: line 3: task labelling: target='bad': target must be one of the", refusal(path))
    (tmp_path / "labelling.csv").write_text('text,label\n"a",good\n"b"\n')
    assert "labelling.csv: line 3: it must have 2 fields" in refusal(path)


def test_a_metric_that_fails_is_told_before_the_model_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "own_failing_metric.py").write_text("def missing(found, target, line):\n    return line['c']\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = {**GENERATE, "metrics": [{"function": "own_failing_metric:missing"}]}
    message = refusal(write_job(tmp_path, tmp_path, task))
    assert "adding.jsonl: line 1: task adding: metrics: 'missing' fails for this item: KeyError: 'c'" in message


def test_a_library_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    from jaxserve.evaluation import metrics

    metrics._bleu.cache_clear()
    message = refusal(write_job(tmp_path, tmp_path, {**GENERATE, "metrics": ["bleu"]}))
    assert "metrics: 'bleu' needs sacrebleu" in message
    assert "pip install 'jaxserve[evaluation]'" in message
    assert extras.optional("json", "x", "y") is json


def test_templates_are_in_a_sandbox():
    with pytest.raises(ValueError, match=r"prompt: .*unsafe"):
        render("{{ a.__class__.__mro__ }}", "prompt", {"a": 1})


def test_a_wrong_job_on_the_command_line(tmp_path, capsys):
    path = write_job(tmp_path, tmp_path, {**GENERATE, "kind": "generat"})
    status, out, err = run(capsys, "eval", path)
    assert (status, out) == (1, "")
    assert err.startswith(f"jaxserve: {path}: line ")
    status, out, err = run(capsys, "eval", tmp_path / "none.yaml")
    assert (status, err) == (1, f"jaxserve: {tmp_path / 'none.yaml'}: No such file or directory\n")
    status, _, err = run(capsys, "eval", "compare", tmp_path)
    assert (status, err) == (1, "jaxserve: compare: 1 given: two results must be named, A and B\n")
    status, _, err = run(capsys, "eval", path, path)
    assert "it must be CONFIG.yaml" in err


def test_few_shot_examples_are_drawn_by_seed_and_never_the_item_itself(tmp_path):
    path = write_job(tmp_path, tmp_path, {**CHOICE, "choices": ["yes", "no"], "target": "A"})
    prompts = {}
    for seed in (1, 2):
        job = yaml.safe_load(path.read_text())
        job |= {"seed": seed, "output": str(tmp_path / f"seed{seed}")}
        path.write_text(yaml.safe_dump(job))
        with Job(load_job(path)) as first, pytest.raises(ValueError, match="another process"):
            Job(load_job(path))
        prompts[seed] = [item.prompt for item in first.tasks[0].items]
    assert prompts[1] != prompts[2]
    for items in prompts.values():
        for n, prompt in enumerate(items):
            shots = re.findall(r"number (\d+) A: (yes|no)\n", prompt)
            assert len({number for number, _ in shots}) == 2
            assert str(n) not in {number for number, _ in shots}
            assert {answer for _, answer in shots} == {"yes"}
            assert prompt.endswith(f"Q: number {n} A:")
        beginnings = {prompt[: prompt.rindex("Q:")] for prompt in items}
        assert len(beginnings) <= 3  # the same examples for all but those that are examples
