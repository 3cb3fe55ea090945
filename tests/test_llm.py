"""The front door for scripts: any kind of prompts in, results in input order out, nothing left behind."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_tools import GOLDEN, SHAPES, byte_tokenizer, write_hub_cache, write_tiny_checkpoint

from jaxserve import LLM, EngineConfig, SamplingParams

NAME = "someone/tiny"
PROMPT = GOLDEN.prompt.tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A prepared hub cache (HF_HOME)."""
    home = tmp_path_factory.mktemp("hub")
    write_hub_cache(home, NAME)
    return home


@pytest.fixture(scope="module")
def shared(hub):
    with LLM(str(next(hub.glob("hub/*/snapshots/*"))), **SHAPES) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """The shared one; nothing may be left in it after a test."""
    yield shared
    assert_idle(shared)


def assert_idle(llm):
    stats = llm.stats()
    assert (stats["num_requests_running"], stats["num_requests_waiting"], stats["kv_cache_usage_perc"]) == (0, 0, 0)
    assert llm._arrived == {}
    while llm.engine.has_unfinished():  # what was aborted is still to be reported
        assert {output.finish_reason for result in llm.engine.step() for output in result.outputs} <= {"abort"}
    llm.engine.check_integrity()


def tokens(results):
    return [[output.token_ids for output in result.outputs] for result in results]


def test_a_checkpoint_continues_as_transformers_does(llm):
    [result] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    certain = min(GOLDEN.certain_length(), 40)
    assert certain > 8
    assert result.outputs[0].token_ids[:certain] == GOLDEN.continuation[:certain].tolist()


def test_results_come_in_input_order_whatever_ends_first(llm):
    lengths = [20, 1, 9, 3, 14, 2, 7, 5, 11, 1, 4, 8]
    prompts = [PROMPT[: 1 + index] for index in range(len(lengths))]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    results = llm.generate(prompts, params)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == lengths
    alone = [llm.generate(prompt, param)[0] for prompt, param in zip(prompts, params, strict=True)]
    assert tokens(results) == tokens(alone)


def test_every_kind_of_prompt(llm):
    text, ids = "Hello there", llm.engine.tokenizer.encode("Hello there")
    kinds = [text, ids, tuple(ids), np.array(ids), {"prompt": text}, {"prompt_token_ids": ids}]
    together = llm.generate(kinds, GREEDY)
    each = [llm.generate(kind, GREEDY) for kind in kinds]
    assert [len(results) for results in each] == [1] * len(kinds)
    assert {tuple(result.outputs[0].token_ids) for result in [*together, *(r for [r] in each)]} == {
        tuple(together[0].outputs[0].token_ids)
    }
    assert [result.prompt for result in together] == [text, None, None, None, text, None]
    assert [result.prompt_token_ids for result in together] == [ids] * len(kinds)
    assert tokens(llm.generate((kind for kind in kinds), GREEDY)) == tokens(together)
    assert tokens(llm.generate(np.array([ids, ids]), GREEDY)) == tokens(together[:2])
    assert llm.generate([], GREEDY) == []


def test_parameters_for_all_or_one_each(llm):
    two = [PROMPT, PROMPT[:5]]
    assert all(1 <= len(result.outputs[0].token_ids) <= 16 for result in llm.generate(two))  # the defaults
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert [len(r.outputs[0].token_ids) for r in llm.generate(two, GREEDY)] == [6, 6]
    assert [len(r.outputs[0].token_ids) for r in llm.generate(two, (GREEDY, short))] == [6, 2]
    assert len(llm.generate(two, [None, short])[1].outputs[0].token_ids) == 2
    for wrong in ([GREEDY], [GREEDY] * 3, []):
        with pytest.raises(ValueError, match=f"^sampling_params: {len(wrong)} given for 2 prompts"):
            llm.generate(two, wrong)


WRONG_PROMPTS = [
    ("", "prompt: it holds no tokens"),
    ([[]], "prompt: it holds no tokens"),
    (["", "x"], "prompt: it holds no tokens"),
    (["x", ""], "prompt: it holds no tokens"),
    (["x", 3], "prompt: int: must be text or a sequence of token ids"),
    ([1.5, 2], r"prompt_token_ids: \[1.5\]"),
    ([1, 128], r"prompt_token_ids: \[128\]: must be integers from 0 to 127"),
    ([[1, 2], [-1]], r"prompt_token_ids: \[-1\]"),
    ([1, True], r"prompt_token_ids: \[True\]"),
    ("x" * 128, "prompt: 128 tokens: must be fewer than max_model_len=128"),
    ("\ud800", "prompt must be valid Unicode"),
    (b"bytes", "prompt: bytes: must be text"),
    (7, "prompts=7: must be a prompt or a sequence of prompts"),
    (None, "prompts=None"),
    ({"text": "x"}, "'prompt' or 'prompt_token_ids'"),
]


@pytest.mark.parametrize(("prompts", "message"), WRONG_PROMPTS, ids=range(len(WRONG_PROMPTS)))
def test_a_wrong_prompt_is_refused_before_anything_runs(llm, prompts, message):
    before = llm.stats()["steps"]
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)
    assert llm.stats()["steps"] == before


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (5, "sampling_params=5"),
        ({"max_tokens": 3}, "sampling_params="),
        ([GREEDY, {"max_tokens": 3}], "params=.*must be a SamplingParams"),
        ([GREEDY, SamplingParams(stop_token_ids=(128,))], r"stop_token_ids: \[128\]"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_runs(llm, params, message):
    before = llm.stats()["steps"]
    with pytest.raises(ValueError, match=message):
        llm.generate(["x", "y"], params)
    assert llm.stats()["steps"] == before
    assert_idle(llm)
    assert len(llm.generate("x", GREEDY)[0].outputs[0].token_ids) == 6


def test_a_stream_gives_every_token_once(llm):
    prompts = [PROMPT, "Hello"]
    whole = llm.generate(prompts, LONG)
    parts = {}
    for delta in llm.stream(prompts, LONG):
        parts.setdefault(delta.request_id, []).append(delta)
    for (_, deltas), result in zip(sorted(parts.items(), key=lambda item: int(item[0])), whole, strict=True):
        assert len(deltas) == 60
        assert [token for delta in deltas for token in delta.outputs[0].token_ids] == result.outputs[0].token_ids
        assert "".join(delta.outputs[0].text for delta in deltas) == result.outputs[0].text
        assert [delta.finished for delta in deltas] == [False] * 59 + [True]


def test_leaving_a_stream_early_aborts_it(llm):
    aborted = llm.stats().get("request_success_abort", 0)
    stream = llm.stream([PROMPT, "Hello", "x"], LONG)
    for _ in range(5):
        next(stream)
    assert llm.stats()["num_requests_running"] == 3
    stream.close()
    assert_idle(llm)
    assert llm.stats()["request_success_abort"] == aborted + 3
    for _ in llm.stream("Hello", LONG):
        break  # the generator is dropped here
    assert_idle(llm)
    assert llm.stats()["request_success_abort"] == aborted + 4


def test_streams_do_not_take_each_others_results(llm):
    expected = tokens(llm.generate(["Hello", "x"], LONG))
    first, second = llm.stream("Hello", LONG), llm.stream("x", LONG)
    taken = [next(first)]
    between = llm.generate(PROMPT, GREEDY)
    taken_second = [next(second)]
    taken += [next(first), next(first)]
    taken_second += list(second)
    taken += list(first)
    joined = [[[t for d in deltas for t in d.outputs[0].token_ids]] for deltas in (taken, taken_second)]
    assert joined == expected
    assert between[0].outputs[0].token_ids == GOLDEN.continuation[:6].tolist()


def test_results_have_vllms_fields(llm):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True, logprobs=2, n=2)
    [result] = llm.generate("Hello", params)
    tokenizer = llm.engine.tokenizer
    assert isinstance(result.request_id, str)
    assert (result.prompt, result.prompt_token_ids) == ("Hello", tokenizer.encode("Hello"))
    assert (result.finished, result.num_cached_tokens) == (True, 0)
    assert [output.index for output in result.outputs] == [0, 1]
    for output in result.outputs:
        assert output.text == tokenizer.decode(output.token_ids)
        assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (5, "length", None)
        chosen = [entry[token] for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert output.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in chosen))
        for entry in output.logprobs:
            for token, logprob in entry.items():
                assert (logprob.decoded_token, logprob.rank >= 1) == (tokenizer.token_text(token), True)
    [plain] = llm.generate("Hello", GREEDY)
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)


def test_text_is_never_half_a_character(llm):
    """The model knows ASCII only, but its 128 ids include ids without text: what is joined is what is decoded."""
    results = llm.generate(["a", "b", "c"], SamplingParams(temperature=2.0, seed=1, max_tokens=50, ignore_eos=True))
    for result in results:
        assert result.outputs[0].text == byte_tokenizer(128).decode(result.outputs[0].token_ids)


def test_options_are_checked(hub):
    folder = str(next(hub.glob("hub/*/snapshots/*")))
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        LLM(folder, max_num_seq=3)
    with pytest.raises(TypeError, match="either a config or options"):
        LLM(folder, config=EngineConfig())
    with pytest.raises(ValueError, match="model='no-such-folder'"):
        LLM("no-such-folder")


def test_closing(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "model")
    with LLM(config=EngineConfig(model=str(folder), **SHAPES)) as llm:
        stream = llm.stream("Hello", LONG)
        next(stream)
        arrays = [layer.pages for layer in llm.engine.runner.kv]
    assert all(array.is_deleted() for array in arrays)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("Hello", GREEDY)
    assert not llm.engine.has_unfinished()


CHAT = [{"role": "user", "content": "Hello"}]


def test_a_chat_is_what_its_template_makes_of_it(llm):
    text = "<user>Hello\n<assistant>"
    [expected] = llm.generate(text, GREEDY)
    [result] = llm.chat(CHAT, GREEDY)
    assert (result.prompt, result.prompt_token_ids) == (text, expected.prompt_token_ids)
    assert tokens([result]) == tokens([expected])
    several = llm.chat([CHAT, [*CHAT, *CHAT], CHAT], [GREEDY, LONG, GREEDY])
    assert [result.prompt for result in several] == [text, "<user>Hello\n<user>Hello\n<assistant>", text]
    assert tokens(several)[::2] == tokens([expected, expected])
    continued = [*CHAT, {"role": "assistant", "content": "Well"}]
    [result] = llm.chat(continued, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert result.prompt == "<user>Hello\n<assistant>Well"
    options = {"chat_template": "{{ mood }}", "chat_template_kwargs": {"mood": "glad"}}
    assert llm.chat(CHAT, GREEDY, **options)[0].prompt == "glad"


@pytest.mark.parametrize("messages", [[], "Hello", [CHAT, []], [CHAT, [{"role": "user"}]], [CHAT, 3]])
def test_a_wrong_chat_is_refused_before_anything_runs(llm, messages):
    before = llm.stats()["steps"]
    with pytest.raises(ValueError, match=r"^messages"):
        llm.chat(messages, GREEDY)
    assert llm.stats()["steps"] == before


def test_progress_counts_requests_and_tokens(llm, capsys):
    results = llm.generate(["Hello", PROMPT, "x"], GREEDY)
    assert capsys.readouterr().err == "", "a bar was shown where there is no terminal"
    assert tokens(llm.generate(["Hello", PROMPT, "x"], GREEDY, use_tqdm=True)) == tokens(results)
    shown = capsys.readouterr().err.split("\r")[-1]
    match = re.search(r"Processed prompts: 100%.* 3/3 \[.*prompt ([\d.]+), output ([\d.]+) tokens/s\]", shown)
    prompt, output = map(float, match.groups())
    assert prompt / output == pytest.approx(sum(len(r.prompt_token_ids) for r in results) / 18, rel=0.05)
    llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


SCRIPT = """
import json, sys, jax
changes = json.loads(sys.argv[2])
for name, value in changes.items():
    jax.config.update(name, value)
before = dict(jax.config.values)
from flax import nnx
from jaxserve import LLM, SamplingParams
from jaxserve.checkpoint.hugging_face import load_hugging_face, resolve_model
with LLM(sys.argv[1], **json.loads(sys.argv[3])) as llm:
    wide = jax.tree.map(lambda leaf: leaf.astype("float64"), nnx.state(load_hugging_face(resolve_model(sys.argv[1]))))
    llm.update_params(wide)  # the same values, as a trainer under x64 may hold them
    params = [SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, seed=5, temperature=t) for t in (0.0, 0.9)]
    results = llm.generate(json.loads(sys.argv[4]), params)
out = [[r.outputs[0].token_ids, [[[i, *p[:2]] for i, p in e.items()] for e in r.outputs[0].logprobs]] for r in results]
changed = [name for name, value in jax.config.values.items() if before[name] != value]
print(json.dumps({"results": out, "changed": changed}))
"""


def test_a_hub_id_and_foreign_jax_settings(hub, llm):
    """Another process, offline: x64, PRNG and precision of someone else change no bit, and stay as they are."""
    foreign = {
        "jax_enable_x64": True,
        "jax_default_prng_impl": "rbg",
        "jax_default_matmul_precision": "bfloat16",
    }
    arguments = [NAME, *(json.dumps(value) for value in (foreign, SHAPES, [PROMPT, PROMPT[:7]]))]
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:jaxserve", "-c", SCRIPT, *arguments],
        # huggingface_hub reads its environment when it is imported
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    params = [SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, seed=5, temperature=t) for t in (0.0, 0.9)]
    outputs = [r.outputs[0] for r in llm.generate([PROMPT, PROMPT[:7]], params)]
    expected = [[o.token_ids, [[[i, *p[:2]] for i, p in e.items()] for e in o.logprobs]] for o in outputs]
    assert found == {"results": expected, "changed": []}


def test_a_hub_id_that_is_not_cached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(ValueError, match="model='someone/absent' is not an existing folder"):
        LLM("someone/absent")
