"""Jobs over a tiny model: what they compute against the library's own calls, resumption, reports, comparison."""

import hashlib
import json
import math
import random
import re

import jsonschema
import numpy as np
import pytest
import yaml
from cli_tools import run
from evaluation_tools import CHOICE, ENGINE, GENERATE, LABELS, TEXTS, lines_of, run_job, without_times, write_job

from jaxserve import LLM, SamplingParams
from jaxserve.evaluation.config import load_job
from jaxserve.evaluation.job import Job
from jaxserve.evaluation.tasks import Task
from jaxserve.evaluation.worker import Worker, windows

SAMPLED = {**GENERATE, "name": "sampled", "sampling": {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}}
CHAT = {**GENERATE, "name": "chat", "chat": True, "system": "Add.", "fewshot": {"num": 1}}
FORM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
FORMED = {
    **GENERATE,
    "name": "formed",
    "sampling": {"max_tokens": 60, "temperature": 1.0, "structured_outputs": {"json": FORM}},
    "postprocess": {"json": "sum"},
}
CHAT_CHOICE = {**LABELS, "name": "chat_choice", "chat": True, "fewshot": {"num": 1}}
TASKS = (GENERATE, SAMPLED, FORMED, CHOICE, LABELS, TEXTS, CHAT, CHAT_CHOICE)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """(job's file, results of an uninterrupted run by name of task, report)."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_job(folder, model, *TASKS, models=[{"name": "tiny"}])
    report = run_job(path)
    return path, {task["name"]: folder / "results" / "tiny" / f"{task['name']}.jsonl" for task in TASKS}, report


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model), **ENGINE) as llm:
        yield llm


def scores_of(report, task):
    [found] = [entry for entry in report["tasks"] if entry["task"] == task]
    return found["results"][0]["metrics"]


def test_generated_answers_are_the_librarys(finished, llm):
    _, files, report = finished
    lines = lines_of(files["adding"])
    prompts = [f"{n} + {3 * n % 7} =" for n in range(12)]
    assert [line["item"] for line in lines] == list(range(12))
    assert [line["prompt"] for line in lines] == prompts
    assert [line["prompt_sha256"] for line in lines] == [hashlib.sha256(p.encode()).hexdigest() for p in prompts]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert [line["output"] for line in lines] == [result.outputs[0].text for result in results]
    assert {(line["finish_reason"], line["num_output_tokens"]) for line in lines} == {("length", 12)}
    targets = [str(n + 3 * n % 7) for n in range(12)]
    assert [line["target"] for line in lines] == targets
    right = [line["prediction"] == target for line, target in zip(lines, targets, strict=True)]
    assert [line["scores"]["accuracy"] for line in lines] == right
    assert scores_of(report, "adding")["accuracy"]["value"] == np.mean(right)


def test_sampled_answers_have_a_seed_each(finished):
    lines = lines_of(finished[1]["sampled"])
    assert len({line["output"] for line in lines}) > 6
    assert lines[0]["output"] != lines_of(finished[1]["adding"])[0]["output"]


def test_answers_have_the_form_that_a_task_asks_for(finished):
    lines = lines_of(finished[1]["formed"])
    assert {line["finish_reason"] for line in lines} == {"stop"}
    for line in lines:
        value = json.loads(line["output"])
        jsonschema.validate(value, FORM)
        assert line["prediction"] == str(value["sum"])
    assert len({line["prediction"] for line in lines}) > 6  # free but for the form


def test_choices_have_the_log_likelihoods_of_the_library(finished, llm):
    _, files, report = finished
    job = load_job(finished[0])
    [items] = [Task(task, job).items for task in job.tasks if task.name == "choosing"]
    right = {"accuracy": [], "accuracy_per_byte": [], "accuracy_per_token": []}
    for line, item in zip(lines_of(files["choosing"]), items, strict=True):
        options = ["one", "two and two", "ten", "no"][: 2 + item.index % 3]
        scores = llm.score(item.prompt, [f" {option}" for option in options])
        assert line["choices"] == options
        assert line["logprobs"] == [score.logprob for score in scores]
        assert line["is_greedy"] == [score.is_greedy for score in scores]
        sums = np.array([score.logprob for score in scores])
        sizes = {"accuracy": 1, "accuracy_per_byte": [len(o) for o in options]}
        sizes["accuracy_per_token"] = [len(score.token_ids) for score in scores]
        assert line["prediction"] == options[int(np.argmax(sums))]
        for name, size in sizes.items():
            right[name].append(int(np.argmax(sums / size)) == item.index % 2)
    found = scores_of(report, "choosing")
    assert {name: found[name]["value"] for name in right} == {n: np.mean(r) for n, r in right.items()}
    assert all(entry["low"] <= entry["value"] <= entry["high"] for entry in found.values())


def test_labels_are_scored_for_every_item(finished, llm):
    lines = lines_of(finished[1]["labelling"])
    for n, line in enumerate(lines):
        scores = llm.score(f"tea, number {n} is", [" good", " bad", " so so"])
        assert line["logprobs"] == [score.logprob for score in scores]
    right = [line["prediction"] == line["target"] for line in lines]
    assert scores_of(finished[2], "labelling")["accuracy"]["value"] == np.mean(right)


def test_perplexity_scores_every_token_but_the_first_once(finished, llm):
    total = count = 0
    for line in lines_of(finished[1]["texts"]):
        ids = llm.engine.tokenizer.encode(line["prompt"])
        logprob, seen, begin = 0.0, 1, 0
        while seen < len(ids):
            end = min(begin + 24, len(ids))
            [score] = llm.score([ids[begin:seen]], [ids[seen:end]])
            logprob, seen, begin = logprob + score.logprob, end, begin + 8
        assert line["logprob"] == pytest.approx(logprob, abs=1e-9)
        assert line["num_scored_tokens"] == len(ids) - 1
        total, count = total + logprob, count + len(ids) - 1
    assert scores_of(finished[2], "texts")["perplexity"]["value"] == pytest.approx(math.exp(-total / count))


def test_scoring_generates_nothing_and_examples_come_from_the_cache(model, tmp_path, llm):
    job = load_job(write_job(tmp_path, model, CHOICE))
    task, worker, before = Task(job.tasks[0], job), Worker(llm.engine), llm.stats()
    results = worker.advance([task.work(item.index, item) for item in task.items])
    while worker.num_open:
        results += worker.advance()
    after = llm.stats()
    assert sorted(result.key for result in results) == list(range(10))
    assert after["generation_tokens"] == before["generation_tokens"]
    examples = min(item.prompt.rindex("Q:") for item in task.items) // 16 * 16  # characters are tokens, 16 a page
    num_requests = sum(len(item.answers) for item in task.items)
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] >= examples * (num_requests - 3 * 4)


@pytest.mark.parametrize(("length", "window", "stride"), [(2, 8, 4), (8, 8, 4), (9, 8, 4), (100, 8, 7), (61, 16, 1)])
def test_windows_cover_a_text(length, window, stride):
    ids, seen = list(range(length)), []
    for tokens, start in windows(ids, window, stride):
        assert 1 <= start < len(tokens) <= window
        assert tokens[0] == 0 or len(tokens) == window or tokens[-1] == length - 1
        seen += tokens[start:]
    assert seen == ids[1:]


def test_chats_go_through_the_template(finished, llm):
    job = load_job(finished[0])
    items = {task.name: Task(task, job).items for task in job.tasks if task.chat}
    texts = {}
    for name, system in (("chat", "<system>Add.\n"), ("chat_choice", "")):
        asked = [(example["content"], answer["content"]) for *_, example, answer, _ in (i.prompt for i in items[name])]
        texts[name] = [
            f"{system}<user>{q}\n<assistant>{a}\n<user>{item.question}\n<assistant>"
            for (q, a), item in zip(asked, items[name], strict=True)
        ]
        assert all(q != item.question for (q, _), item in zip(asked, items[name], strict=True))
        if name == "chat":
            assert all(sum(map(int, re.findall(r"\d+", q))) == int(a) for q, a in asked)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = [result.outputs[0].text for result in llm.generate(texts["chat"], params)]
    assert [line["output"] for line in lines_of(finished[1]["chat"])] == answers
    for line, text in zip(lines_of(finished[1]["chat_choice"]), texts["chat_choice"], strict=True):
        assert line["logprobs"] == [score.logprob for score in llm.score(text, ["good", "bad", "so so"])]


def test_two_runs_give_the_same_bytes(finished, model, tmp_path):
    """Also where the engine runs in another way."""
    running = {"enable_prefix_caching": False, "async_scheduling": False, "scheduling_policy": "static"}
    path = write_job(tmp_path, model, *TASKS, models=[{"name": "tiny", **running}])
    run_job(path)
    for name, file in finished[1].items():
        assert without_times(tmp_path / "results" / "tiny" / f"{name}.jsonl") == without_times(file)


def test_a_cut_file_is_completed_and_nothing_is_computed_twice(finished, model, tmp_path, monkeypatch):
    path = write_job(tmp_path, model, GENERATE, CHOICE, TEXTS, models=[{"name": "tiny"}])
    done, source = {}, random.Random(0)
    (tmp_path / "results" / "tiny").mkdir(parents=True)
    for task in ("adding", "choosing", "texts"):
        lines = finished[1][task].read_bytes().splitlines(keepends=True)
        source.shuffle(lines)
        done[task] = lines[: len(lines) // 2]
        torn = lines[len(lines) // 2][:-5]
        (tmp_path / "results" / "tiny" / f"{task}.jsonl").write_bytes(b"".join(done[task]) + torn)
    added = []
    add = Worker._add
    monkeypatch.setattr(Worker, "_add", lambda self, work: (added.append(work.key), add(self, work))[1])
    run_job(path)
    assert len(added) == len(set(added)) == 6 + 5 + 2
    for task in done:
        file = tmp_path / "results" / "tiny" / f"{task}.jsonl"
        assert without_times(file) == without_times(finished[1][task])
        assert set(done[task]) <= set(file.read_bytes().splitlines(keepends=True))
    added.clear()
    run_job(path)
    assert added == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "{{ a }} plus {{ b }} ="}, "line 1: item 0 is of another prompt"),
        ({"sampling": {"max_tokens": 11, "ignore_eos": True}}, "line 1: item 0 is of other settings"),
        ({"target": "{{ a }}"}, "line 2: item 1 is of other settings"),
        ({"limit": 3}, "line 4: item 3: there are 3 items"),
    ],
)
def test_results_of_another_job_are_not_continued(finished, model, tmp_path, change, message):
    path = write_job(tmp_path, model, {**GENERATE, **change}, models=[{"name": "tiny"}])
    (tmp_path / "results" / "tiny").mkdir(parents=True)
    file = tmp_path / "results" / "tiny" / "adding.jsonl"
    file.write_bytes(finished[1]["adding"].read_bytes())
    with pytest.raises(ValueError, match=f"{file}: {message}"):
        Job(load_job(path))


def test_results_of_another_model_are_refused_unless_they_may_go(finished, model, tmp_path):
    path = write_job(tmp_path, model, {**GENERATE, "limit": 2}, models=[{"name": "tiny", "max_model_len": 100}])
    (tmp_path / "results" / "tiny").mkdir(parents=True)
    file = tmp_path / "results" / "tiny" / "adding.jsonl"
    file.write_bytes(b"".join(finished[1]["adding"].read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(ValueError, match="line 1: item 0 is of other settings or another model"):
        Job(load_job(path))
    run_job(write_job(tmp_path, model, {**GENERATE, "limit": 2, "delimiter": "-"}), overwrite=True)
    assert len(lines_of(tmp_path / "results" / model.name / "adding.jsonl")) == 2


def test_an_item_that_fails_says_so_and_the_others_count(model, tmp_path, capsys):
    """One prompt is too long for the engine; a metric of the user's own scores the rest."""
    (tmp_path / "own_metric.py").write_text(
        "def length(found, target, line):\n    return len(found or '') + line['a'] * 0\n"
    )
    task = {**GENERATE, "prompt": "{{ a }}{{ ' long' * 30 if a == 2 else '' }}", "limit": 4}
    task |= {"metrics": ["contains", {"function": "own_metric:length", "name": "size"}]}
    path = write_job(tmp_path, model, task, models=[{"name": "tiny"}])
    status, out, err = run(capsys, "eval", path, "--progress", "true")
    assert status == 1, err
    assert "tiny (4 items, 1 failed)" in out
    assert "size" in out
    assert re.search(r"tiny: 100%.*4/4 \[\d+:\d+<00:00,\s+\S*(item/s|s/item)\]", err.replace("\r", "\n")), err
    lines = lines_of(tmp_path / "results" / "tiny" / "adding.jsonl")
    assert [line.get("error", "")[:19] for line in lines] == ["", "", "prompt: 151 tokens:", ""]
    sizes = [len(line["prediction"] or "") for line in lines if "error" not in line]
    report = json.loads((tmp_path / "results" / "report.json").read_text())
    assert scores_of(report, "adding")["size"]["value"] == pytest.approx(np.mean(sizes))


def test_a_metric_that_fails_later_names_the_line(model, tmp_path, monkeypatch):
    (tmp_path / "late_metric.py").write_text("def late(found, target, line):\n    return 1 / (line['a'] - 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = {**GENERATE, "metrics": [{"function": "late_metric:late"}]}
    path = write_job(tmp_path, model, task)
    with pytest.raises(
        ValueError, match=r"adding\.jsonl: line 4: task adding: metrics: 'late' fails .*division by zero"
    ):
        run_job(path)


# ---- reports ----------------------------------------------------------------------------------------------


def check_plots(page, report, runs):
    """A bar and its interval for each metric and model; for each run's lines a histogram."""
    plots = re.findall(r"<figure><svg [^>]*>(.*?)</svg><figcaption>(.*?)</figcaption>", page)
    metrics = {
        name: [result["metrics"][name] for result in task["results"]]
        for task in report["tasks"]
        for name in task["results"][0]["metrics"]
    }
    number = r"([\d.]+)"
    intervals = [plot for plot in plots if "whisker" in plot[0]]
    for (drawing, caption), (name, found) in zip(intervals, metrics.items(), strict=True):
        assert caption.startswith(f"{name}, 0 to ")
        bars = re.findall(rf"<rect class='bar' x='{number}'[^>]* width='{number}'", drawing)
        ends = re.findall(rf"class='whisker' d='M{number} [\d.]+H{number}M", drawing)
        left, scale = float(bars[0][0]), max(float(high) for _, high in ends)
        places = [
            (float(w) + float(x), float(low), float(high)) for (x, w), (low, high) in zip(bars, ends, strict=True)
        ]
        scale = (scale - left) / max(each["high"] for each in found)
        right = [[left + scale * each[key] for key in ("value", "low", "high")] for each in found]
        assert np.array(places) == pytest.approx(np.array(right), abs=0.2)
    histograms = [drawing for drawing, _ in plots if "whisker" not in drawing]
    for drawing, lines in zip(histograms, runs, strict=True):
        heights = [float(height) for height in re.findall(rf"<rect class='bar'[^>]* height='{number}'", drawing)]
        if "logprobs" in lines[0]:  # how clear the choice was, else nats per token
            values = [np.sort(line["logprobs"])[-1] - np.sort(line["logprobs"])[-2] for line in lines]
        else:
            values = [-line["logprob"] / line["num_scored_tokens"] for line in lines]
        counts = np.histogram(values, bins=len(lines))[0]
        assert np.array(heights) / max(heights) == pytest.approx(counts / counts.max(), abs=0.01)


def test_models_are_compared_in_the_report(model, tmp_path, capsys):
    models = [{"name": "f32"}, {"name": "bf16", "dtype": "bfloat16"}]
    path = write_job(tmp_path, model, CHOICE, TEXTS, models=models)
    status, out, _ = run(capsys, "eval", path)
    assert status == 0
    assert "bf16 against f32 (10 items)" in out
    report = json.loads((tmp_path / "results" / "report.json").read_text())
    [choosing, texts] = report["tasks"]
    a, b = (lines_of(tmp_path / "results" / name / "texts.jsonl") for name in ("f32", "bf16"))
    value = [math.exp(-sum(x["logprob"] for x in y) / sum(x["num_scored_tokens"] for x in y)) for y in (a, b)]
    [pair] = texts["comparisons"]
    assert (pair["a"], pair["b"], pair["num_items"]) == ("f32", "bf16", 4)
    found = pair["metrics"]["perplexity"]
    assert (found["a"], found["b"], found["value"]) == pytest.approx((*value, value[1] - value[0]))
    worst = max(abs(x["logprob"] - y["logprob"]) for x, y in zip(a, b, strict=True))
    assert pair["max_logprob_difference"] == pytest.approx(worst)
    assert choosing["comparisons"][0]["metrics"].keys() == set(CHOICE["metrics"])

    page = (tmp_path / "results" / "report.html").read_text()
    assert not re.search(r"https?://|<link|src=", page)  # nothing to load
    for n in range(10):
        assert f"Q: number {n} A:" in page
    assert page.count("<details") >= 14
    assert "bf16" in page
    lines = {name: lines_of(tmp_path / "results" / name / "choosing.jsonl") for name in ("f32", "bf16")}
    check_plots(page, report, [*lines.values(), a, b])
    for name, mine in lines.items():
        wrong = [line["item"] for line in mine if line["scores"]["accuracy"] < 1]
        [shown] = re.findall(f"<h3>Wrong answers of {name}</h3>(.*?)<h3>", page)
        assert re.findall(r"<details class='wrong'><summary>(\d+) ", shown) == [str(item) for item in wrong[:5]] != []

    left, right = tmp_path / "results" / "f32", tmp_path / "results" / "bf16"
    status, out, _ = run(capsys, "eval", "compare", left, right, "--output", tmp_path / "compared")
    assert status == 0
    assert "bf16" in out
    assert "p = " in out
    compared = json.loads((tmp_path / "compared" / "compare.json").read_text())
    assert {t["task"] for t in compared["tasks"]} == {"choosing", "texts"}
    assert "Evaluation" in (tmp_path / "compared" / "compare.html").read_text()
    same, out, _ = run(capsys, "eval", "compare", left / "texts.jsonl", left / "texts.jsonl")
    assert (same, "p = 1.0000: no difference shown" in out) == (0, True)


def test_what_cannot_be_compared(finished, tmp_path, capsys):
    file = finished[1]["adding"]
    other = tmp_path / "adding.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for content, message in (
        ("".join(lines[:-1]), "item 11 is missing"),
        ("".join(lines).replace(json.loads(lines[2])["prompt_sha256"], "0"), "item 2 has another prompt"),
        ("text\n", "line 1: this is no line of results"),
    ):
        other.write_text(content)
        status, _, err = run(capsys, "eval", "compare", file, other)
        assert (status, message in err) == (1, True), err
    status, _, err = run(capsys, "eval", "compare", file, tmp_path / "none")
    assert (status, "it holds no result files" in err) == (1, True)


def test_a_larger_file_is_an_option(model, tmp_path, capsys):
    path = write_job(tmp_path, model, {**GENERATE, "data": "none.jsonl"}, models=[{"name": "tiny"}])
    data = tmp_path / "adding.jsonl"
    options = [
        "--data",
        data,
        "--limit",
        2,
        "--output",
        tmp_path / "elsewhere",
        "--engine.enable_prefix_caching",
        "false",
    ]
    status, _, err = run(capsys, "eval", path, *options)
    assert status == 0, err
    assert len(lines_of(tmp_path / "elsewhere" / "tiny" / "adding.jsonl")) == 2
    assert yaml.safe_load(path.read_text())["tasks"][0]["data"] == "none.jsonl"
