"""lm-evaluation-harness over a tiny model: its requests against the library's own calls, and a whole task."""

import json
import math
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from evaluation_tools import ENGINE

from jaxserve import SamplingParams
from jaxserve.evaluation import harness

GOLDENS = Path(__file__).parent.parent / "goldens"
lm_eval_model = pytest.importorskip("jaxserve.evaluation.lm_eval_model")


@pytest.fixture(scope="module")
def lm(model):
    lm = lm_eval_model.JaxserveLM(str(model), batch_size="auto", max_length=100, **{**ENGINE, "max_model_len": None})
    yield lm
    lm.llm.close()


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


def test_it_is_registered_by_entry_point():
    from lm_eval.api.registry import get_model

    project = tomllib.loads((GOLDENS.parent.parent / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["lm_eval.models"].items()
    assert name == "jaxserve"
    assert EntryPoint(name, value, "lm_eval.models").load() is lm_eval_model.JaxserveLM
    harness.register()
    harness.register()
    assert get_model("jaxserve") is lm_eval_model.JaxserveLM
    assert lm_eval_model.JaxserveLM.__abstractmethods__ == frozenset()


def test_loglikelihoods(lm):
    pairs = [("Q: one A:", " yes"), ("Q: one A:", " no"), ("Q: two ", "maybe"), ("", "alone"), ("x" * 120, " end")]
    found = lm.loglikelihood(requests(*pairs))
    for (context, continuation), (logprob, greedy) in zip(pairs[:3], found, strict=False):
        [score] = lm.llm.score(context, continuation)
        assert (logprob, greedy) == (score.logprob, score.is_greedy)
    encode = lm.llm.engine.tokenizer.encode
    [alone] = lm.llm.score([[lm.prefix_token_id]], [encode("alone")])
    [cut] = lm.llm.score([encode("x" * 97)], [encode(" end")])
    assert [logprob for logprob, _ in found[3:]] == [alone.logprob, cut.logprob]
    assert lm.loglikelihood([]) == []


def test_rolling_loglikelihoods(lm):
    """Every token once; windows of `max_length` tokens, as the harness cuts them."""
    text = "The cat sat on the mat, and the dog lay by the door. " * 4
    ids = lm.llm.engine.tokenizer.encode(text)
    assert len(ids) == 212
    short, found = lm.loglikelihood_rolling(requests(("ab",), (text,)))
    parts = [([lm.prefix_token_id], ids[:100]), ([ids[99]], ids[100:200]), (ids[111:200], ids[200:])]
    expected = sum(lm.llm.score([context], [part])[0].logprob for context, part in parts)
    assert found == pytest.approx(expected, abs=1e-6)
    assert short == pytest.approx(lm.llm.score([[lm.prefix_token_id]], [ids[:0] + lm.tok_encode("ab")])[0].logprob)


def test_generation(lm):
    on = {"ignore_eos": True}
    until = lm.llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].text
    stop = until[3:5]
    found = lm.generate_until(
        requests(
            ("Hello", {"until": [], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7, **on}),
            ("Hello", {"until": [stop], "max_new_tokens": 8, **on}),
            ("Hello" + "x" * 200, {"until": stop, "max_gen_toks": 4}),
        )
    )
    assert found[:2] == [until, until[: until.index(stop)]]
    cut = lm.llm.generate(("Hello" + "x" * 200)[-97:], SamplingParams(temperature=0, max_tokens=4, stop=stop))
    assert found[2] == cut[0].outputs[0].text
    with pytest.raises(TypeError, match="no field 'num_beam'"):
        lm.generate_until(requests(("Hello", {"num_beam": 4})))


def test_chats(lm):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    assert lm.apply_chat_template(chat[:1]) == "<user>Hi\n<assistant>"
    assert lm.apply_chat_template(chat, add_generation_prompt=False).endswith("<assistant>Well")
    assert lm.chat_template(True) == lm.llm.chat_template.source
    assert lm.chat_template(False) is None


def test_a_whole_task(lm, tmp_path):
    """A task file over local data, through the harness's evaluator: accuracy by hand."""
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from lm_eval.tasks import TaskManager

    rows = [{"q": f"number {n}", "options": ["one", "two and two"], "right": n % 2} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "local_task.yaml").write_text(
        "task: local_task\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}, cache_dir: {tmp_path / 'cache'}}}\n"
        "output_type: multiple_choice\n"
        "test_split: test\n"
        "doc_to_text: 'Q: {{q}} A:'\n"
        "doc_to_choice: options\n"
        "doc_to_target: right\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = evaluator.simple_evaluate(lm, tasks=["local_task"], task_manager=manager, bootstrap_iters=0)
    right = norm = 0
    for row in rows:
        scores = [s.logprob for s in lm.llm.score(f"Q: {row['q']} A:", [f" {option}" for option in row["options"]])]
        lengths = [len(option) for option in row["options"]]
        right += max((0, 1), key=lambda i: scores[i]) == row["right"]
        norm += max((0, 1), key=lambda i: scores[i] / lengths[i]) == row["right"]
    results = found["results"]["local_task"]
    assert (results["acc,none"], results["acc_norm,none"]) == pytest.approx((right / 6, norm / 6))
    assert math.isfinite(results["acc,none"])


@pytest.mark.slow  # the demo model, in float32
def test_scores_are_those_of_the_harnesss_hf_class(monkeypatch, tmp_path):
    """On local tasks: the same scores and texts; log-likelihoods within 1e-3, of a passage's 130 tokens within 1e-2."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(GOLDENS)
    from make_lm_eval_goldens import evaluated

    made = []

    def make_model(max_length):
        for lm in made:
            lm.llm.close()
        options = {"dtype": "float32", "max_num_seqs": 16, "deterministic": False, "num_pages": 512}
        made.append(lm_eval_model.JaxserveLM(max_length=max_length, **options))
        return made[-1]

    found = evaluated(make_model)
    made[-1].llm.close()
    for task, golden in json.loads((GOLDENS / "lm_eval.json").read_text()).items():
        assert found[task]["scores"] == pytest.approx(golden["scores"], rel=1e-4), task
        for ours, theirs in zip(found[task]["responses"], golden["responses"], strict=True):
            if task == "example_arithmetic":
                assert ours == theirs
                continue
            for [mine], [other] in zip(ours, theirs, strict=True):
                one, two = (value if isinstance(value, float) else value[0] for value in (mine, other))
                assert float(one) == pytest.approx(float(two), abs=1e-2 if task == "example_passages" else 1e-3), task
