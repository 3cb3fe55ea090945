"""Structured output in the engine: a constrained request changes nothing for others, and nothing changes it."""

import asyncio
import json
import re
from dataclasses import replace

import engine_tools
import numpy as np
import pytest
from checkpoint_tools import byte_tokenizer
from draft_head_tools import tiny_head
from engine_tools import assert_same, collect, one_branch, requests_for, run, run_alone

from jaxserve import AsyncEngine, SamplingParams, StructuredOutputsParams
from jaxserve.structured import compiler

VOCAB, END = 300, 7  # the tiny model's end of sequence, which is also the character of that token

# As in test_speculative.py: programs are shared through the compilation cache.
FIXED = {
    "method": "ngram",
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "num_speculative_tokens": 5,
    "length_control": "fixed",
}
TEXT = byte_tokenizer(VOCAB)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 12},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
FORMS = [
    {"json": PERSON},
    {"regex": "(ab|cd){30,45}x?"},
    {"choice": ["yes", "no", "yesterday"]},
    {"grammar": 'start: "(" start ")" | "x"'},
]


def tiny_engine(**options):
    defaults = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "text": TEXT}
    return engine_tools.tiny_engine(**{**defaults, **options})


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


def constrained(count: int) -> list:
    requests = []
    for index in range(count):
        params = SamplingParams(
            temperature=0.0 if index % 3 == 2 else 1.0,
            seed=index,
            max_tokens=12 if index % 5 == 4 else 120,
            n=2 if index % 4 == 1 else 1,
            logprobs=-1 if index == 3 else 2,
            presence_penalty=0.5 if index % 4 == 3 else 0.0,
            min_tokens=3 if index % 4 == 1 else 0,
            structured_outputs={**FORMS[index % len(FORMS)], "disable_any_whitespace": index % 8 == 0},
        )
        requests.append(([20 + index, 30, 40 + index] * (1 + index), params))
    return requests


@pytest.fixture(scope="module")
def requests():
    plain = [(prompt, replace(params, logprobs=2)) for prompt, params in requests_for(VOCAB, 10, longest=60)]
    return [request for pair in zip(plain, constrained(10), strict=True) for request in pair]


@pytest.fixture(scope="module")
def expected(engine, requests):
    """Each request alone: the plain ones are sampled by programs that know no masks."""
    return run_alone(engine, requests)


def check_forms(results, requests) -> int:
    """Every output that was not cut has its form. Returns how many there are."""
    ended = 0
    for result, (_, params) in zip(results, requests, strict=True):
        form = params.structured_outputs
        for output in result.outputs if form is not None else ():
            if output.finish_reason == "length":
                continue
            ended += 1
            assert output.finish_reason == "stop"
            text = output.text
            if form.json:
                person = json.loads(text)
                assert list(person) == ["name", "tags"]
                assert len(person["name"]) <= 5
                assert set(person["tags"]) <= {"a", "b"}
            elif form.regex:
                assert re.fullmatch(form.regex, text)
            elif form.choice:
                assert text in form.choice
            else:
                assert re.fullmatch(r"\(*x\)*", text)
                assert text.count("(") == text.count(")")
    return ended


def test_beside_plain_requests(engine, requests, expected):
    engine.reset_stats()
    results = run(engine, requests)
    assert 0 < engine.stats()["constrained_steps"] <= engine.stats()["steps"]
    assert_same(results, expected)
    assert [output.text for r in results for output in r.outputs] == [o.text for r in expected for o in r.outputs]
    assert check_forms(results, requests) >= 10


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_pages": 10}, marks=pytest.mark.slow),
        {"async_scheduling": False},
        pytest.param({"attention_backend": "xla", "linear_backend": "xla"}, marks=pytest.mark.slow),
        {"speculative_config": FIXED, "budget": 8},  # heads of 8 rows only
    ],
    ids=["preempted", "without overlap", "xla", "speculating"],
)
def test_whatever_the_engine_does(requests, expected, options):
    with tiny_engine(**options) as engine:
        if "linear_backend" in options:
            requests = requests[:6]
            expected = run_alone(engine, requests)
        if "num_pages" in options:  # the constrained ones first: their prompts are short, and they grow
            requests, expected = ([*values[1::2], *values[::2]] for values in (requests, expected))
        assert_same(run(engine, requests), expected)
        stats = engine.stats()
        if "num_pages" in options:
            assert stats["num_preemptions"] > 0
        if "speculative_config" in options:
            assert 0 < stats["spec_num_accepted_tokens"] < stats["spec_num_draft_tokens"]
            drafts_of_constrained_requests_are_accepted(engine)
        # A warm-up compiles these, and nothing else was needed.
        used = {key for key in engine.runner.compiler.executables() if key[0] != "row_invariance"}
        assert used <= {program.key for program in engine.runner.programs()}


def drafts_of_constrained_requests_are_accepted(engine):
    engine.reset_stats()
    params = SamplingParams(temperature=1, seed=1, max_tokens=60, structured_outputs={"regex": "(ab){40}"})
    [result] = run(engine, [([20, 21], params)])
    assert result.outputs[0].text == "ab" * 30
    assert engine.stats()["spec_num_accepted_tokens"] > 30
    assert engine.stats()["steps"] < 30


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["agreement", "rejection"])
def test_beside_a_draft_head(requests, expected, acceptance):
    """With rejection, sampled tokens may be others, but forms hold, and greedy requests are the same."""
    config = {"method": "eagle", "num_speculative_tokens": 3, "length_control": "fixed", "acceptance": acceptance}
    head = tiny_head(engine_tools.tiny_decoder(), np.arange(0, VOCAB, 2))
    with tiny_engine(speculative_config=config, draft_decoder=head) as engine:
        results = run(engine, requests)
        assert engine.stats()["spec_num_draft_tokens"] > 0
        same = [
            index for index, (_, params) in enumerate(requests) if acceptance == "agreement" or not params.temperature
        ]
        assert_same([results[index] for index in same], [expected[index] for index in same])
        assert check_forms(results, requests) >= 5


def test_branches_are_as_alone(engine):
    params = SamplingParams(temperature=1, seed=5, n=4, max_tokens=60, structured_outputs={"regex": "[a-z]{3,20}"})
    request = [([11, 12, 13], params)]
    branches = run(engine, request)[0].outputs
    alone = [result.outputs[0] for result in run_alone(engine, one_branch(request))]
    assert [branch.token_ids for branch in branches] == [output.token_ids for output in alone]
    assert len({branch.text for branch in branches}) == 4


def outputs(engine, count: int = 1, **fields):
    params = [SamplingParams(**{"temperature": 1, "max_tokens": 60, "seed": seed, **fields}) for seed in range(count)]
    return [result.outputs[0] for result in run(engine, [([9, 10], each) for each in params])]


def test_where_outputs_end(engine):
    """At the end of sequence where the form allows it, and by themselves where it allows nothing else."""
    for output in outputs(engine, 8, structured_outputs={"regex": "[ab]{2,}"}, logit_bias={END: 3.0}):
        assert output.finish_reason == "stop"
        assert re.fullmatch("[ab]{2,}", output.text)
        assert output.token_ids[-1] == END
    for output in outputs(engine, 8, structured_outputs={"regex": "[ab]{2,}"}, ignore_eos=True):
        assert (output.finish_reason, len(output.text)) == ("length", 60)
    for output in outputs(engine, 4, structured_outputs={"regex": "[ab]{4}"}, ignore_eos=True):
        assert (output.finish_reason, output.stop_reason, len(output.text)) == ("stop", None, 4)
    for output in outputs(engine, 4, structured_outputs={"regex": "[ab]{2,}"}, min_tokens=9, logit_bias={END: 50.0}):
        assert len(output.text) == 9
    for output in outputs(engine, 4, structured_outputs={"regex": "[ab]{2}"}, min_tokens=9):
        assert (output.finish_reason, len(output.text)) == ("stop", 2)


def test_stops_that_the_form_accepts(engine):
    form = {"regex": "[abc]{10,}"}
    [c] = TEXT.encode("c")
    for output in outputs(engine, 8, structured_outputs=form, stop_token_ids=[c]):
        assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("stop", c, c)
        assert re.fullmatch("[ab]*", output.text)
    for output in outputs(
        engine, 8, structured_outputs=form, stop="ab", include_stop_str_in_output=True, ignore_eos=True
    ):
        assert output.stop_reason == "ab"
        assert output.text.endswith("ab")
    [output] = outputs(engine, structured_outputs={"choice": ["abc"]}, stop="bc")
    assert (output.text, output.stop_reason) == ("a", "bc")
    [output] = outputs(engine, structured_outputs={"choice": ["abc"]}, stop="cd")
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", None)


def test_logprobs_are_those_of_the_model(engine):
    """Of the raw distribution: what a plain request gets for the same tokens as a prompt."""
    [output] = outputs(engine, structured_outputs={"regex": "[a-c]{6}"}, logprobs=0)
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [result] = run(engine, [([9, 10, *output.token_ids], scored)])
    for token, ours, theirs in zip(output.token_ids, output.logprobs, result.prompt_logprobs[2:], strict=True):
        assert ours[token] == theirs[token]


def test_aborted_in_the_middle(engine, requests, expected):
    """Some are aborted at every moment of their lives; the others are as alone, and nothing is lost."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(f"{index}", prompt, params)
    results, step = {}, 0
    while engine.has_unfinished():
        collect(engine.step(), results)
        step += 1
        if step % 2 == 0 and step // 2 < len(requests) and (step // 2) % 2:
            engine.abort(f"{step // 2}")
    engine.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    whole = [i for i in range(len(requests)) if all(o.finish_reason != "abort" for o in results[f"{i}"].outputs)]
    assert 10 <= len(whole) < len(requests)
    assert_same([results[f"{i}"] for i in whole], [expected[i] for i in whole])


def test_a_grammar_that_gives_up_ends_its_request_alone(engine, requests, expected, monkeypatch):
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 40)
    params = SamplingParams(temperature=1, max_tokens=60, structured_outputs={"regex": "(a|b)*a(a|b){12}"})
    *results, failed = run(engine, [*requests[:6], ([5, 6], params)])
    assert_same(results, expected[:6])
    [output] = failed.outputs
    assert output.finish_reason == "error"
    assert output.error.startswith("structured_outputs: the grammar is too complex after ")


def test_no_token_is_left(engine):
    params = SamplingParams(max_tokens=5, allowed_token_ids=[50], structured_outputs={"choice": ["(", "!"]})
    [result] = run(engine, [([5, 6], params)])
    assert result.outputs[0].finish_reason == "error"
    assert "structured_outputs" in result.outputs[0].error


def test_what_cannot_be_honoured_is_refused(engine):
    for form in ({"regex": "("}, {"json": {"type": "nothing"}}):
        params = SamplingParams(structured_outputs=form)
        with pytest.raises(ValueError, match="structured_outputs: it cannot be compiled"):
            engine.add_request("x", [1], params)
        with pytest.raises(ValueError, match="structured_outputs: it cannot be compiled"):
            engine.input_processor.check([1], params)
    assert not engine.has_unfinished()
    run(engine, [([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))])
    with pytest.raises(ValueError, match="exactly one"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", json_object=True))
    with pytest.raises(ValueError, match="did you mean"):
        SamplingParams(structured_outputs={"chioce": ["a"]})
    with (
        engine_tools.tiny_engine(max_num_seqs=8, max_num_batched_tokens=32) as bare,
        pytest.raises(ValueError, match="needs a tokenizer"),
    ):
        bare.add_request("x", [1], SamplingParams(structured_outputs={"regex": "a"}))


@pytest.mark.slow
def test_in_another_process(tmp_path):
    from checkpoint_tools import SHAPES, write_tiny_checkpoint

    async def main():
        folder = write_tiny_checkpoint(tmp_path)
        async with AsyncEngine(model=str(folder), run_in="process", **SHAPES) as engine:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]{5}"))
            engine.input_processor.check("x", params)
            async for output in engine.generate("x", params):
                yield output.outputs[0].text

    async def text():
        return "".join([part async for part in main()])

    assert re.fullmatch("[ab]{5}", asyncio.run(text()))
