"""The example jobs with the demo model in float32, against transformers on the same items."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from evaluation_tools import lines_of, run_job

pytestmark = pytest.mark.slow  # 200 continuations in float32
ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "configs" / "evaluation"
GOLDEN = Path(__file__).parent.parent / "goldens" / "smollm2_evaluation.npz"
ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "deterministic": False, "num_pages": 512}


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The result lines of one job over the examples' data: choices, numbers after problems, texts."""
    folder = tmp_path_factory.mktemp("smollm2")
    data = [json.loads(line) for line in (CONFIGS / "arithmetic.jsonl").read_text().splitlines()]
    for row in data:
        right = int(row["answer"].split("####")[-1])
        row["numbers"] = [str(number) for number in range(right - 2, right + 4)]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    [choices] = yaml.safe_load((CONFIGS / "multiple_choice.yaml").read_text())["tasks"]
    [texts] = yaml.safe_load((CONFIGS / "perplexity.yaml").read_text())["tasks"]
    del choices["fewshot"]
    numbers = {**choices, "name": "numbers", "data": "numbers.jsonl", "choices": "numbers", "target": "2"}
    for task in (choices, texts):
        task["data"] = str(CONFIGS / task["data"])
    job = {"engine": ENGINE, "models": [{"name": "m"}], "output": str(folder), "tasks": [choices, numbers, texts]}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    report = run_job(folder / "job.yaml")
    scores = {task["task"]: task["results"][0]["metrics"] for task in report["tasks"]}
    names = ("multiple_choice", "numbers", "passages")
    return {name: (lines_of(folder / "m" / f"{name}.jsonl"), scores[name]) for name in names}


def test_200_log_likelihoods(results, golden):
    for name, key in (("multiple_choice", "choices"), ("numbers", "numbers")):
        found = np.array([line["logprobs"] for line in results[name][0]])
        assert found.shape == golden[key].shape
        np.testing.assert_allclose(found, golden[key], atol=1e-3, rtol=0)
    assert golden["choices"].size + golden["numbers"].size == 200


def test_accuracy_and_perplexity(results, golden):
    rows = [json.loads(line) for line in (CONFIGS / "multiple_choice.jsonl").read_text().splitlines()]
    right = np.array(["ABCD".index(row["answer"]) for row in rows])
    sizes = np.array([[len(choice.encode()) for choice in row["choices"]] for row in rows])
    scores = results["multiple_choice"][1]
    assert scores["accuracy"]["value"] == np.mean(golden["choices"].argmax(-1) == right)
    assert scores["accuracy_per_byte"]["value"] == np.mean((golden["choices"] / sizes).argmax(-1) == right)
    lines, scores = results["passages"]
    total, count = golden["texts"].sum(0)
    # Of 130 tokens each.
    np.testing.assert_allclose([line["logprob"] for line in lines], golden["texts"][:, 0], atol=1e-2, rtol=0)
    assert [line["num_scored_tokens"] for line in lines] == golden["texts"][:, 1].tolist()
    assert scores["perplexity"]["value"] == pytest.approx(np.exp(-total / count), rel=1e-4)
