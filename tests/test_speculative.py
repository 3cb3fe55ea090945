"""Speculation changes nothing but the speed: tokens, log-probabilities and texts with and without it are the same."""

from dataclasses import replace

import engine_tools
import pytest
from checkpoint_tools import byte_tokenizer
from engine_tools import assert_same, repetitive_requests, requests_for, run, run_alone, tiny_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import SamplingParams

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FIXED = {**NGRAM, "num_speculative_tokens": 5, "length_control": "fixed"}


def tiny_engine(**options):
    """Few buckets: each is a head of its own."""
    defaults = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "text": byte_tokenizer(300)}
    return engine_tools.tiny_engine(**{**defaults, **options})


@pytest.fixture(scope="module")
def plain():
    with tiny_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def speculating():
    with tiny_engine(speculative_config=FIXED) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests():
    return requests_for(300, 24, longest=100, max_tokens=50)


@pytest.fixture(scope="module")
def expected(plain, requests):
    return run(plain, requests)


def drafts_are_accepted(engine) -> None:
    stats = engine.stats()
    assert 0 < stats["spec_num_accepted_tokens"] < stats["spec_num_draft_tokens"], "nothing was verified"


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": FIXED},
        {"speculative_config": NGRAM},  # the controller changes lengths
        {"speculative_config": FIXED, "async_scheduling": False},
    ],
    ids=["fixed", "auto", "without overlap"],
)
def test_the_same_as_without(expected, requests, options):
    with tiny_engine(**options) as engine:
        assert_same(run(engine, requests), expected)
        drafts_are_accepted(engine)


@pytest.mark.slow
def test_the_same_as_without_when_preempted(plain):
    """Two requests of three pages grow to six, and there are ten."""
    params = [SamplingParams(temperature=t, max_tokens=50, seed=3, logprobs=2, ignore_eos=True) for t in (0.0, 0.9)]
    requests = [([(7 * i + k) % 50 + 10 for i in range(40)], params[k % 2]) for k in range(4)]
    expected = run(plain, requests)
    with tiny_engine(speculative_config=FIXED, num_pages=10) as engine:
        assert_same(run(engine, requests), expected)
        drafts_are_accepted(engine)
        assert engine.stats()["num_preemptions"] > 0


@pytest.mark.parametrize(
    "backends",
    [
        {"attention_backend": "xla"},  # native products beside it
        {"attention_backend": "xla", "linear_backend": "xla"},
    ],
    ids=["attention", "everything"],
)
@pytest.mark.slow
def test_the_same_as_without_through_xla(requests, backends):
    few = {"max_num_batched_tokens": 16, "max_num_seqs": 4, **backends}
    with tiny_engine(**few) as engine:
        expected = run(engine, requests[::3])
    with tiny_engine(**few, speculative_config=FIXED) as engine:
        assert_same(run(engine, requests[::3]), expected)
        drafts_are_accepted(engine)


ALONE = {"prompt_lookup": False, "draft_confidence_threshold": 0}  # all drafts are the model's
MODEL = {"method": "draft_model", "num_speculative_tokens": 4, **ALONE}


def agrees(stats) -> None:
    """The model itself proposes: what it proposes it takes, sampled tokens, penalties and all. But for a few: its bits
    are not promised to be the same in the loop that drafts, and a near tie may fall to either side."""
    assert stats["spec_num_accepted_tokens"] > 0.95 * stats["spec_num_draft_tokens"] > 0


@pytest.mark.slow
def test_the_model_itself_agrees(expected, requests):
    with tiny_engine(speculative_config=MODEL, draft_decoder=tiny_decoder()) as engine:
        assert_same(run(engine, requests), expected)
        agrees(engine.stats())


@pytest.mark.slow
def test_a_draft_model_follows_cached_prefixes_and_branches():
    """Pages found in the cache and copied ones hold the draft model's keys and values, too: it goes on agreeing."""
    with tiny_engine(speculative_config={**MODEL, "length_control": "fixed"}, draft_decoder=tiny_decoder()) as engine:
        prompt = [(7 * i) % 50 + 10 for i in range(60)]
        params = SamplingParams(max_tokens=30, temperature=0.8, seed=3, n=3)
        for _ in range(2):
            run(engine, [(prompt, params)])
            stats = engine.stats()
            agrees(stats)
        assert stats["prefix_cache_hits"] > 0


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match=r"speculative_config.model=None"):
        tiny_engine(speculative_config=MODEL)
    with pytest.raises(ValueError, match="vocab_size=301"):
        tiny_engine(speculative_config=MODEL, draft_decoder=tiny_decoder(vocab_size=301))
    with pytest.raises(ValueError, match="max_position_embeddings=64"):
        tiny_engine(speculative_config=MODEL, draft_decoder=tiny_decoder(max_position_embeddings=64))
    with pytest.raises(ValueError, match="draft_decoder"):
        tiny_engine(speculative_config=NGRAM, draft_decoder=tiny_decoder())
    with pytest.raises(ValueError, match=r"method='n_gram'.*did you mean 'ngram'"):
        tiny_engine(speculative_config={"method": "n_gram"})
    with pytest.raises(ValueError, match="num_speculative_tokens=16"):
        tiny_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 16})


def test_alone_and_cached(speculating, requests, expected):
    some = slice(0, 24, 4)
    assert_same(run_alone(speculating, requests[some]), expected[some])
    assert_same(run(speculating, requests[some]), expected[some])  # from the prefix cache


def test_requests_may_decline(speculating, requests, expected):
    declined = [(prompt, replace(params, speculative=False)) for prompt, params in requests[:8]]
    speculating.reset_stats()
    assert_same(run(speculating, declined), expected[:8])
    assert speculating.stats()["spec_num_draft_tokens"] == 0


def test_a_proposal_that_is_not_compiled_holds_back_no_tokens():
    """Where the program that proposes is missing the step before is delivered first, as for the others."""
    prompt, params = [20, 30] * 4, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with tiny_engine(speculative_config=FIXED) as engine:
        run(engine, [(prompt, replace(params, speculative=False))])
        size = {"num_tokens": 6, "num_sampled": 6, "greedy": True}
        assert engine.runner.is_compiled(num_drafting=0, **size)
        assert not engine.runner.is_compiled(num_drafting=1, **size)
        engine.add_request("speculating", prompt, params)
        delivered = []
        while engine.has_unfinished():
            delivered.append(sum(len(output.token_ids) for result in engine.step() for output in result.outputs))
        assert delivered[:2] == [0, 1]  # dispatched; delivered before the compilation
        assert engine.runner.is_compiled(num_drafting=1, **size)


def test_texts_that_stop_inside_accepted_drafts(plain, speculating):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    prompts = [[20 + index, 30, 40] * 6 for index in range(8)]
    whole = [result.outputs[0].text for result in run(plain, [(prompt, params) for prompt in prompts])]
    requests = []
    for index, (prompt, text) in enumerate(zip(prompts, whole, strict=True)):
        for at in (len(text) // 5, len(text) // 2, 3 * len(text) // 4):
            stops = {"stop": (text[at : at + 2],), "include_stop_str_in_output": index % 2 == 0, "min_tokens": index}
            requests.append((prompt, replace(params, **stops)))
    speculating.reset_stats()
    results = [result.outputs[0] for result in run(speculating, requests)]
    assert results == [result.outputs[0] for result in run(plain, requests)]
    stopped = [output for output in results if output.finish_reason == "stop"]
    assert len(stopped) > len(results) / 2
    assert all(isinstance(output.stop_reason, str) for output in stopped)
    drafts_are_accepted(speculating)


@settings(max_examples=5, deadline=None)
@given(st.lists(repetitive_requests(), min_size=1, max_size=6))
def test_any_parameters(plain, speculating, requests):
    assert_same(run(speculating, requests), run(plain, requests))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(repetitive_requests(), min_size=1, max_size=6))
def test_many_parameters(plain, speculating, requests):
    assert_same(run(speculating, requests), run(plain, requests))
