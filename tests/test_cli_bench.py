"""`jaxserve bench throughput`: the work is what it says, and the figures are the engine's own."""

import json
import re

import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from cli_tools import flags, refused, run

from jaxserve import LLM
from jaxserve.bench import workload
from jaxserve.bench.workload import Item


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model")


def bench(capsys, tmp_path, folder, *arguments):
    """The results of a run (one work), and what it printed."""
    engine = flags(folder)
    engine = engine[: engine.index("--sampling.temperature")]
    result = tmp_path / "result.json"
    status, out, err = run(capsys, "bench", "throughput", *engine, *arguments, "--output-json", result)
    assert status == 0, err
    [report] = json.loads(result.read_text())["results"]
    return report, out


def test_random_work_of_fixed_lengths(capsys, tmp_path, folder):
    arguments = ["--num-prompts", 3, "--input-len", 10, "--output-len", 5, "--repeats", 2]
    report, out = bench(capsys, tmp_path, folder, *arguments)
    assert (report["requests"], report["prompt_tokens"], report["output_tokens"]) == (3, 30, 15)
    # By hand: 30 prompt tokens in steps of 8, then 3 sequences decode; no step holds more than 8 tokens.
    assert report["steps"] >= 30 // 8 + 4
    assert 0 <= report["padding_waste"] < 1
    assert 0 < report["kv_waste"] < 1
    assert (report["prefix_cache_hits"], report["preemptions"], report["compilations_while_measured"]) == (0, 0, 0)
    assert report["output_tokens_per_s"] == pytest.approx(15 / report["seconds"])
    assert report["total_tokens_per_s"] == pytest.approx(45 / report["seconds"])
    assert report["peak_memory"] > 2**26, "less than Python itself needs"
    assert f"random: {report['output_tokens_per_s']:.1f} output tokens/s" in out
    assert re.search(r"3 requests, 30 prompt and 15 output tokens in [\d.]+ s, \d+ steps", out)


def test_static_batches_take_more_steps(capsys, tmp_path, folder):
    """32 requests of lognormal lengths in 8 slots: a batch lasts as long as its longest."""
    trace = tmp_path / "trace.csv"
    lengths = [(3, 4 + 30 * (index % 8 == 0)) for index in range(32)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"x,{p},{o}\n" for p, o in lengths))
    arguments = ["--trace", trace, "--warm-up", "false"]
    continuous, _ = bench(capsys, tmp_path, folder, *arguments)
    static, out = bench(capsys, tmp_path, folder, *arguments, "--scheduling-policy", "static")
    assert "deterministic false, static" in out
    assert static["output_tokens"] == continuous["output_tokens"] == sum(output for _, output in lengths)
    assert static["steps"] >= 4 * 34, "each batch of 8 has one request of 34 tokens"
    assert continuous["steps"] < 0.8 * static["steps"]


def test_a_shared_prefix_is_found(capsys, tmp_path, folder):
    arguments = ["--num-prompts", 4, "--input-len", 5, "--output-len", 2, "--prefix-len", 32, "--warm-up", "false"]
    report, _ = bench(capsys, tmp_path, folder, *arguments, "--max-num-seqs", 1)
    assert (report["prompt_tokens"], report["prefix_cache_hits"]) == (4 * 37, 3 * 32)
    report, _ = bench(capsys, tmp_path, folder, *arguments, "--max-num-seqs", 1, "--prefix-share", 0.5)
    assert (report["prompt_tokens"], report["prefix_cache_hits"]) == (4 * 5 + 2 * 32, 32)


def test_prompts_of_a_file(capsys, tmp_path, folder):
    lines = [
        {"question_id": 1, "turns": ["first", "second"]},
        {"question": "how many?", "answer": "7"},
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"prompt": "not asked for"},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--dataset", tmp_path / "prompts.jsonl", "--num-prompts", 3, "--output-len", 3]
    report, _ = bench(capsys, tmp_path, folder, *arguments)
    texts = ["first", "how many?", "<user>Hello\n<assistant>"]
    assert (report["name"], report["requests"]) == ("prompts.jsonl", 3)
    assert report["prompt_tokens"] == sum(map(len, texts))
    assert report["output_tokens"] == 9


def test_what_does_not_fit_the_context_is_cut_and_said(capsys, tmp_path, folder):
    arguments = ["--num-prompts", 2, "--input-len", 200, "--output-len", 4, "--warm-up", "false"]
    report, out = bench(capsys, tmp_path, folder, *arguments)
    assert "2 of 2 requests cut to max_model_len=128" in out
    assert (report["prompt_tokens"], report["output_tokens"]) == (2 * 124, 8)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--trace", "absent.csv"], ["trace='absent.csv'", "an existing file"]),
        (["--trace", "a", "--dataset", "b"], ["trace and dataset: the work is one of"]),
        (["--num-prompts", "0"], ["num_prompts=0", "at least 1"]),
        (["--prefix-share", "2"], ["prefix_share=2", "from 0 to 1"]),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(capsys, monkeypatch, arguments, parts):
    monkeypatch.setattr("jaxserve.llm.Engine", lambda *_, **__: pytest.fail("an engine was started"))
    refused(capsys, "bench", "throughput", *arguments, parts=parts, status=1)


def test_names_are_checked(capsys):
    refused(capsys, "bench", "throughput", "--num-prompt", 3, parts=["num_prompt", "did you mean 'num_prompts'"])
    refused(capsys, "bench", "throughput", "--cases", "batch 2", parts=["batch 2", "batch 8"])


def test_files_that_hold_something_else(tmp_path):
    file = tmp_path / "x"
    for text, message in [
        ("a,b\n1,2\n", "must have the columns ContextTokens, GeneratedTokens"),
        ("ContextTokens,GeneratedTokens\n1,2\n1,x\n", "line 3: its lengths must be integers"),
        ("ContextTokens,GeneratedTokens\n1\n", "line 2: its lengths"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            workload.csv_trace(file, 9)
    for text, message in [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"answer": "a"}\n', "line 1: must be an object with one of prompt"),
        ("[1]\n", "line 1: must be an object"),
        ('{"prompt": ""}\n', "line 1: must be"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            list(workload.jsonl_prompts(file, 9))


def test_work_is_random_and_repeatable():
    for make in (lambda seed: workload.trace(20, seed, 300), lambda seed: workload.fixed(20, 9, 4, seed, 300)):
        work = make(3)
        assert work == make(3)
        assert work != make(4)
        assert len({tuple(item.prompt) for item in work}) == 20
        assert all(0 <= token < 300 for item in work for token in item.prompt)
    shared = workload.share_prefix(work, 16, 0.25, vocab=300)
    longer = [new for new, old in zip(shared, work, strict=True) if len(new.prompt) == len(old.prompt) + 16]
    assert len(longer) == 5
    assert len({tuple(item.prompt[:16]) for item in longer}) == 1


def test_fitting_keeps_outputs_before_prompts():
    work = [Item([1] * 5, 5), Item([1] * 6, 5), Item([1] * 3, 20)]
    assert workload.fit(work, 10) == ([Item([1] * 5, 5), Item([1] * 5, 5), Item([1], 9)], 2)


def test_counting_from_zero(folder):
    with LLM(str(folder), **SHAPES) as llm:
        llm.generate("Hello")
        llm.engine.reset_stats()
        stats = llm.stats()
        assert {stats[n] for n in ("steps", "prompt_tokens", "generation_tokens", "prefix_cache_queries")} == {0}
        assert stats["compilations"] > 0
