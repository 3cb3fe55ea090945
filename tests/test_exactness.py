"""A request gives the same bits whatever happens around it: tiny models here, the real one at the end.

Compared are token ids and log-probabilities with all their bits. The expected result is always that of the
request alone, with its prompt computed in one step (one of 300 tokens: in two).
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from engine_tools import (
    assert_same,
    collect,
    one_branch,
    requests_for,
    run,
    run_alone,
    tiny_engine,
)

from jaxserve import Engine, SamplingParams
from jaxserve.scheduler.scheduler import Scheduler

VOCAB = 300


# float32 has programs of its own, which take as long again to compile; one test of it is in the quick tier.
@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def requests():
    """One of the prompts is longer than a step of 256 tokens."""
    requests = requests_for(VOCAB, 32)
    source = random.Random(1)
    requests[5] = ([source.randrange(VOCAB - 1) for _ in range(300)], requests[5][1])
    return requests


@pytest.fixture(scope="module")
def alone(dtype, requests):
    with tiny_engine(dtype, enable_prefix_caching=False) as engine:
        assert engine.deterministic is True
        return run_alone(engine, requests)


def test_in_company(dtype, requests, alone):
    with tiny_engine(dtype, enable_prefix_caching=False) as engine:
        assert_same(run(engine, requests), alone)
        assert engine.stats()["padding_waste"] < 0.8


@pytest.mark.parametrize("budget", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_in_chunks(dtype, requests, alone, budget):
    with tiny_engine(dtype, enable_prefix_caching=False, budget=budget) as engine:
        assert_same(run(engine, requests), alone)


def test_in_static_batches(dtype, requests, alone):
    with tiny_engine(dtype, scheduling_policy="static") as engine:
        assert_same(run(engine, requests), alone)


def test_displaced_by_those_who_come_later_and_go_first(dtype, requests, alone):
    """More branches than slots, and each arrival outranks all before it."""
    with tiny_engine(dtype, scheduling_policy="priority") as engine:
        results = {}
        for index, (prompt, params) in enumerate(requests):
            engine.add_request(f"{index}", prompt, replace(params, priority=-index))
            collect(engine.step() if index % 8 == 7 else [], results)
        while engine.has_unfinished():
            collect(engine.step(), results)
        assert engine.stats()["num_preemptions"] > 0
        assert_same([results[f"{index}"] for index in range(len(requests))], alone)


def test_in_chunks_of_random_sizes(dtype, requests, alone, monkeypatch):
    source = random.Random(0)
    monkeypatch.setattr(Scheduler, "chunk_limit", lambda self, request: source.randint(1, request.num_to_compute))
    with tiny_engine(dtype, enable_prefix_caching=False) as engine:
        assert_same(run(engine, requests), alone)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 64, "num_pages": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8},
        {"async_scheduling": False},
        pytest.param({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, marks=pytest.mark.slow),
    ],
    ids=["page size 64", "no overlap", "whole prompts"],
)
def test_with_other_options(dtype, requests, alone, options):
    with tiny_engine(dtype, **options) as engine:
        assert_same(run(engine, requests), alone)


def test_cold_and_from_the_prefix_cache(dtype, requests, alone):
    with tiny_engine(dtype) as engine:
        assert_same(run(engine, requests), alone)
        cold = engine.stats()["prefix_cache_hits"]
        assert_same(run(engine, requests), alone)
        assert engine.stats()["prefix_cache_hits"] - cold > sum(len(prompt) for prompt, _ in requests) // 2


# The pool holds one request of the greatest length, so requests of ordinary length preempt each other.
SMALL_POOL = {"num_pages": 32}


@pytest.fixture(scope="module")
def long_answers():
    requests = requests_for(VOCAB, 12, seed=5, longest=40)
    return [(prompt, replace(params, max_tokens=60, ignore_eos=True)) for prompt, params in requests]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"async_scheduling": False, "enable_prefix_caching": False}, marks=pytest.mark.slow)],
    ids=["overlap", "no overlap"],
)
def test_with_preemptions(dtype, long_answers, options):
    with tiny_engine(dtype, enable_prefix_caching=False) as engine:
        expected = run_alone(engine, long_answers)
        assert engine.stats()["num_preemptions"] == 0
    with tiny_engine(dtype, **SMALL_POOL, **options) as engine:
        assert_same(run(engine, long_answers), expected)
        assert engine.stats()["num_preemptions"] >= 3


def test_branches_are_requests_with_derived_seeds(dtype, requests, alone):
    with tiny_engine(dtype) as engine:
        single = run(engine, one_branch(requests))
    branches = [branch for result in alone for branch in result.outputs]
    assert [result.outputs[0].token_ids for result in single] == [branch.token_ids for branch in branches]
    assert [result.outputs[0].logprobs for result in single] == [branch.logprobs for branch in branches]


def test_decoded_and_recomputed(dtype, requests, alone):
    """The rest of an answer is the answer to the prompt with its beginning."""
    beginnings, rests = [], []
    for (prompt, params), result in zip(one_branch(requests), (b for r in alone for b in r.outputs), strict=True):
        cut = len(result.token_ids) // 2
        if cut and not (params.presence_penalty or params.frequency_penalty):  # these tell output from prompt
            rest = SamplingParams(**{**_fields(params), "max_tokens": params.max_tokens - cut})
            beginnings.append(([*prompt, *result.token_ids[:cut]], rest))
            rests.append((result.token_ids[cut:], result.logprobs[cut:]))
    with tiny_engine(dtype, enable_prefix_caching=False) as engine:
        for result, (tokens, logprobs) in zip(run(engine, beginnings), rests, strict=True):
            assert result.outputs[0].token_ids == tokens
            assert result.outputs[0].logprobs == logprobs


def _fields(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_aborts_change_nothing_for_the_others(dtype, requests, alone):
    with tiny_engine(dtype, budget=64) as engine:
        for index, (prompt, params) in enumerate(requests):
            engine.add_request(str(index), prompt, params)
        results = {}
        for step in range(10**6):
            if not engine.has_unfinished():
                break
            for delta in engine.step():
                if delta.request_id in results:
                    results[delta.request_id].extend(delta)
                else:
                    results[delta.request_id] = delta
            if step % 3 == 0 and step < 30:
                engine.abort(str(step))
        engine.check_integrity()
    kept = [index for index in range(len(requests)) if index % 3 or index >= 30]
    assert_same([results[str(index)] for index in kept], [alone[index] for index in kept])


def test_junk_in_unowned_pages_and_positions_changes_nothing(dtype, requests, alone):
    with tiny_engine(dtype, enable_prefix_caching=False) as engine:
        junk = [layer._replace(pages=layer.pages + np.asarray(3e4, layer.pages.dtype)) for layer in engine.runner.kv]
        engine.runner.kv = tuple(junk)
        assert_same(run(engine, requests), alone)


def test_a_request_that_overflows_ends_with_an_error_and_leaves_no_trace(dtype, requests, alone):
    """Token 299's embedding is infinite: prompts with it fail, and whoever gets their pages is exact."""
    with tiny_engine(dtype, **SMALL_POOL) as engine:
        weights = engine.runner.weights
        poisoned = weights._replace(embed=weights.embed.at[299].set(np.asarray(np.inf, weights.embed.dtype)))
        clean = [(prompt, params) for prompt, params in requests if 299 not in prompt]
        expected = [result for (prompt, _), result in zip(requests, alone, strict=True) if 299 not in prompt]
        engine.runner.weights = poisoned
        bad = [([*prompt[:20], 299, *prompt[20:100]], params) for prompt, params in clean]
        mixed = [request for pair in zip(bad, clean, strict=True) for request in pair]
        results = run(engine, mixed)
        assert {branch.finish_reason for result in results[::2] for branch in result.outputs} == {"error"}
        assert all("not finite" in branch.error for result in results[::2] for branch in result.outputs)
        same = [i for i, result in enumerate(expected) if all(299 not in b.token_ids[:-1] for b in result.outputs)]
        assert len(same) > len(expected) // 2
        assert_same([results[1::2][i] for i in same], [expected[i] for i in same])


def test_float32_in_company_in_chunks_and_from_the_cache(requests):
    some = requests[:8]
    with tiny_engine("float32", max_num_batched_tokens=128, max_num_seqs=8) as engine:
        expected = run_alone(engine, some)
        engine.scheduler.pool.drop_cache()
        assert_same(run(engine, some), expected)
        assert_same(run(engine, some), expected)


@pytest.mark.slow
def test_through_xla_alone_in_company_and_after_preemptions(long_answers):
    """Without the native functions, as on a machine without a compiler."""
    xla = {"attention_backend": "xla", "linear_backend": "xla"}
    with tiny_engine("bfloat16", enable_prefix_caching=False, **xla) as engine:
        assert engine.runner.step.linear_kernel is None
        assert engine.runner.step.attention.name == "xla"
        expected = run_alone(engine, long_answers)
        assert_same(run(engine, long_answers), expected)
    with tiny_engine("bfloat16", budget=64, **SMALL_POOL, **xla) as engine:
        assert_same(run(engine, long_answers), expected)
        assert_same(run(engine, long_answers), expected)
        assert engine.stats()["num_preemptions"] > 0


def test_a_seed_decides_and_nothing_else_does():
    prompt = list(range(20))
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in (1, 2, 1)]
    with tiny_engine() as engine:
        first, second, again = run(engine, [(prompt, p) for p in params])
        assert first.outputs[0].token_ids == again.outputs[0].token_ids != second.outputs[0].token_ids


def test_without_determinism_it_still_runs():
    with tiny_engine("float32", deterministic=False) as engine:
        assert engine.runner.buckets.tokens[0] == 8
        assert isinstance(engine, Engine)
        assert run(engine, [([1, 2, 3], SamplingParams(max_tokens=3))])[0].finished
