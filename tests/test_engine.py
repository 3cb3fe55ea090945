"""The engine's loop: what it refuses, how requests end, what it counts, and what it gives back."""

import contextlib
import gc
import itertools
import os
import threading
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_tools import byte_tokenizer
from engine_tools import assert_same, requests_for, run, tiny_decoder, tiny_engine

from jaxserve import Engine, EngineConfig, Logprob, SamplingParams
from jaxserve.runner import determinism

VOCAB = 300
PROMPT = list(range(20, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def shared():
    with tiny_engine("float32", text=byte_tokenizer(VOCAB)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def trusted(shared, monkeypatch):
    """The shared engine has tested this machine for determinism: the others save the time."""
    assert shared.deterministic is True
    monkeypatch.setattr(determinism, "row_invariance", lambda *_: None)


@pytest.fixture
def engine(shared):
    """The shared one; it must be idle and whole after every test."""
    yield shared
    while shared.has_unfinished():
        shared.step()
    assert_idle(shared)


def assert_idle(engine):
    engine.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    assert (engine._groups, engine._outputs._texts, engine._pending) == ({}, {}, [])
    assert not engine.scheduler.has_unfinished()


def forget_cached(engine):
    """Empty the prefix cache."""
    pool = engine.scheduler.pool
    pages = pool.allocate(pool.num_free)
    pool.forget(pages)
    pool.release(pages)


def collect(engine, reports=(), steps=10**6):
    """What was reported so far and what comes until the end (or for some steps): every output of each request."""
    reports = list(reports)
    while engine.has_unfinished() and steps:
        reports.append(engine.step())
        steps -= 1
    found = {}
    for output in itertools.chain(*reports):
        found.setdefault(output.request_id, []).append(output)
    return found


def one(engine, prompt, params=GREEDY):
    return run(engine, [(prompt, params)])[0]


# ---- what is refused ------------------------------------------------------------------------------------

WRONG_REQUESTS = [
    ({"prompt": []}, "^prompt: it holds no tokens"),
    ({"prompt": ""}, "^prompt: it holds no tokens"),
    ({"prompt": np.array([], np.int32)}, "^prompt: it holds no tokens"),
    ({"prompt": [-1]}, r"^prompt_token_ids: \[-1\]: must be integers from 0 to 299"),
    ({"prompt": [1, 300, 5, 2**40]}, r"^prompt_token_ids: \[300, 1099511627776\]"),
    ({"prompt": [1, 2.0]}, r"^prompt_token_ids: \[2.0\]"),
    ({"prompt": [True, 1]}, r"^prompt_token_ids: \[True\]"),
    ({"prompt": ["a"]}, r"^prompt_token_ids: \['a'\]"),
    ({"prompt": [[1]]}, r"^prompt_token_ids: \[\[1\]\]"),
    ({"prompt": [None]}, r"^prompt_token_ids: \[None\]"),
    ({"prompt": np.array([1.0])}, r"^prompt_token_ids: \[.*1.0"),
    ({"prompt": np.array([True])}, r"^prompt_token_ids: \[.*True"),
    ({"prompt": np.array([[1, 2]])}, "^prompt: ndarray: must be text or a sequence of token ids"),
    ({"prompt": np.array(3)}, "^prompt: ndarray: must be"),
    ({"prompt": b"ab"}, "^prompt: bytes: must be"),
    ({"prompt": bytearray(b"ab")}, "^prompt: bytearray: must be"),
    ({"prompt": None}, "^prompt: NoneType: must be"),
    ({"prompt": 7}, "^prompt: int: must be"),
    ({"prompt": {1, 2}}, "^prompt: set: must be"),
    ({"prompt": "a\udfff"}, "^prompt must be valid Unicode"),
    ({"prompt": [1] * 512}, "^prompt: 512 tokens: must be fewer than max_model_len=512"),
    ({"prompt": "x" * 600}, "^prompt: 600 tokens: must be fewer than max_model_len=512"),
    ({"prompt": {}}, r"^prompt: keys \[\]: must be 'prompt' or 'prompt_token_ids'"),
    ({"prompt": {"text": "a"}}, r"^prompt: keys \['text'\]"),
    ({"prompt": {"prompt": "a", 1: 2}}, r"^prompt: keys \['prompt', 1\]"),
    ({"prompt": {"prompt": [1, 2]}}, "^prompt: list: 'prompt' must be text"),
    ({"prompt": {"prompt_token_ids": "ab"}}, "^prompt_token_ids: str: .*'prompt_token_ids' token ids"),
    ({"prompt": {"prompt_token_ids": None}}, "^prompt: NoneType: must be"),
    ({"request_id": 3}, "^request_id=3: request_id must be a string"),
    ({"request_id": None}, "^request_id=None"),
    ({"request_id": ["a"]}, r"^request_id=\['a'\]"),
    ({"request_id": "running"}, "^request_id='running': request_id must be a string that no running request has"),
    ({"request_id": "waiting"}, "^request_id='waiting'"),
    ({"params": {"max_tokens": 3}}, "^params=.*: params must be a SamplingParams"),
    ({"params": 3}, "^params=3"),
    ({"params": SamplingParams(stop_token_ids=(5, 300))}, r"^stop_token_ids: \[300\]: must be integers from 0 to 299"),
    ({"params": SamplingParams(logit_bias={"191222": -100})}, r"^logit_bias: \[191222\]: must be integers from 0"),
    ({"params": SamplingParams(allowed_token_ids=[1, 300])}, r"^allowed_token_ids: \[300\]"),
    (
        {"params": SamplingParams(bad_words=["word" * 20])},
        "^bad_words=.*: bad_words must be texts of at most 16 tokens",
    ),
    ({"params": SamplingParams(allowed_token_ids=[7], min_tokens=1)}, "^allowed_token_ids=.*: .* other than the stop"),
    ({"prompt": {"prompt": "a", "cache_salt": 3}}, "^cache_salt=3"),
    (
        {"prompt": [1] * 513, "params": SamplingParams(max_tokens=0)},
        "^prompt: 513 tokens: must be at most max_model_len",
    ),
    (
        {"params": SamplingParams(priority=-1)},
        "^priority=-1: priority must be 0 unless scheduling_policy is 'priority'",
    ),
]


@pytest.fixture(scope="module")
def undisturbed(shared):
    return one(shared, PROMPT)


def snapshot(engine):
    scheduler = engine.scheduler
    queues = [list(scheduler.running), list(scheduler.waiting), list(scheduler.preempted)]
    return engine.stats(), engine.input_processor._arrivals, dict(engine._groups), dict(engine._outputs._texts), queues


def test_bad_requests_are_refused_and_disturb_nobody(engine):
    """One after the other, while one request runs and one waits."""
    undisturbed = one(engine, PROMPT, LONG).outputs[0].token_ids
    engine.add_request("running", PROMPT, LONG)
    reports = [engine.step(), engine.step()]
    engine.add_request("waiting", PROMPT, LONG)
    for index, (wrong, message) in enumerate(WRONG_REQUESTS):
        arguments = {"request_id": "bad", "prompt": [1, 2], "params": None} | wrong
        before = snapshot(engine)
        with pytest.raises(ValueError, match=message):
            engine.add_request(*arguments.values())
        assert snapshot(engine) == before, wrong
        if index % 4 == 3:
            reports.append(engine.step())
    found = collect(engine, reports)
    assert set(found) == {"running", "waiting"}
    for outputs in found.values():
        assert [token for o in outputs for token in o.outputs[0].token_ids] == undisturbed


def test_text_needs_a_tokenizer():
    with tiny_engine("float32") as engine:
        with pytest.raises(ValueError, match=r"^prompt: text needs a tokenizer"):
            engine.add_request("a", "text")
        assert not engine.has_unfinished()


def test_every_way_to_give_a_prompt(engine):
    text = "Hello"
    ids = byte_tokenizer(VOCAB).encode(text)
    kinds = [ids, tuple(ids), np.array(ids, np.int32), np.array(ids, np.uint16), list(np.array(ids)), text]
    results = run(engine, [(kind, GREEDY) for kind in [*kinds, {"prompt": text}, {"prompt_token_ids": tuple(ids)}]])
    assert [result.prompt_token_ids for result in results] == [ids] * len(results)
    assert all(type(i) is int for result in results for i in result.prompt_token_ids)
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
    assert [result.prompt for result in results] == [None] * 5 + [text, text, None]


def test_an_id_is_free_again_once_its_request_has_ended(engine, undisturbed):
    for _ in range(2):
        assert_same([one(engine, PROMPT)], [undisturbed])
    engine.add_request("0", PROMPT, GREEDY)
    engine.step()
    engine.abort("0")
    engine.add_request("0", PROMPT, GREEDY)  # the first one's report and its step in flight are still to come
    outputs = collect(engine)["0"]
    assert [o.outputs[0].finish_reason for o in outputs if o.finished] == ["abort", "length"]
    assert [t for o in outputs for t in o.outputs[0].token_ids] == undisturbed.outputs[0].token_ids


# ---- how requests end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps", [0, 1, 2, 3, 6], ids=["queued", "in prefill", "in prefill 2", "decoding", "decoding 2"]
)
@pytest.mark.parametrize("n", [1, 3])
def test_abort_frees_pages_at_once_and_is_reported_once(engine, undisturbed, steps, n):
    pool = engine.scheduler.pool
    forget_cached(engine)
    engine.add_request("long", list(range(300)) + list(range(100)), replace(LONG, n=n))
    reports = [engine.step() for _ in range(steps)]
    engine.add_request("other", PROMPT, GREEDY)
    assert (pool.num_free < pool.num_pages) == (steps > 0)
    engine.abort("long")
    assert pool.num_free == pool.num_pages
    engine.check_integrity()
    engine.abort("long")
    engine.abort("unknown")
    found = collect(engine, reports)
    ends = [output for o in found["long"] for output in o.outputs if output.finish_reason is not None]
    assert sorted((output.index, output.finish_reason) for output in ends) == [(i, "abort") for i in range(n)]
    assert [o.finished for o in found["long"]] == [False] * (len(found["long"]) - 1) + [True]
    assert [t for o in found["other"] for t in o.outputs[0].token_ids] == undisturbed.outputs[0].token_ids
    engine.abort("long")
    assert engine.step() == []


def test_abort_where_some_branches_have_ended(engine):
    first = [one(engine, PROMPT, SamplingParams(seed=1, max_tokens=8, ignore_eos=True, n=2)).outputs[i] for i in (0, 1)]
    stop = first[0].token_ids[1]
    assert stop not in first[1].token_ids
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True, n=2, stop_token_ids=(stop,))
    engine.add_request("a", PROMPT, params)
    reports = [engine.step() for _ in range(7)]
    engine.abort("a")
    ends = [(o.index, o.finish_reason) for r in collect(engine, reports)["a"] for o in r.outputs if o.finish_reason]
    assert ends == [(0, "stop"), (1, "abort")]


def test_stop_tokens_end_of_sequence_and_length(engine, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = one(engine, PROMPT, params).outputs[0].token_ids
    place = next(i for i in range(4, 12) if tokens.index(tokens[i]) == i)
    stop = tokens[place]
    tokenizer = engine.tokenizer

    def ends(**changes):
        output = one(engine, PROMPT, replace(params, **changes)).outputs[0]
        assert output.token_ids == tokens[: len(output.token_ids)]
        shown = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        assert output.text == tokenizer.decode(shown)
        return len(output.token_ids), output.finish_reason, output.stop_reason

    assert ends() == (12, "length", None)
    assert ends(max_tokens=1) == (1, "length", None)
    assert ends(stop_token_ids=(stop,)) == (place + 1, "stop", stop)
    assert ends(stop_token_ids=(299 if stop != 299 else 298, stop)) == (place + 1, "stop", stop)
    assert ends(stop_token_ids=(stop,), max_tokens=place + 1) == (place + 1, "stop", stop)  # both at once: the stop
    assert ends(stop_token_ids=(stop,), max_tokens=place) == (place, "length", None)
    unsaid = next(token for token in PROMPT if token not in tokens)
    assert ends(stop_token_ids=(unsaid,)) == (12, "length", None)  # what the prompt holds stops nothing
    monkeypatch.setattr(engine.input_processor, "model_config", replace(engine.model_config, eos_token_ids=(stop, 299)))
    assert ends(ignore_eos=False) == (place + 1, "stop", None)
    assert ends(ignore_eos=False, stop_token_ids=(stop,)) == (place + 1, "stop", stop)
    assert ends(ignore_eos=True) == (12, "length", None)
    assert ends(ignore_eos=True, stop_token_ids=(stop,)) == (place + 1, "stop", stop)


def test_the_context_is_the_last_limit(engine):
    prompt = [i % VOCAB for i in range(500)]
    for max_tokens in (None, 13, 10**6):
        output = one(engine, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)).outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (12, "length")
    exact = one(engine, prompt, SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)).outputs[0]
    assert (len(exact.token_ids), exact.finish_reason) == (11, "length")
    longest = one(engine, [i % VOCAB for i in range(511)], SamplingParams(temperature=0, ignore_eos=True)).outputs[0]
    assert (len(longest.token_ids), longest.finish_reason) == (1, "length")


def test_deltas_are_new_tokens_and_text_only(engine):
    params = SamplingParams(temperature=3.0, seed=4, max_tokens=40, ignore_eos=True, logprobs=1, n=2)
    whole = one(engine, PROMPT, params)
    engine.add_request("a", PROMPT, params)
    deltas = collect(engine)["a"]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    for index, want in enumerate(whole.outputs):
        parts = [output for delta in deltas for output in delta.outputs if output.index == index]
        assert [len(part.token_ids) for part in parts] == [1] * 40
        assert [part.token_ids[0] for part in parts] == want.token_ids
        assert [entry for part in parts for entry in part.logprobs] == want.logprobs
        assert "".join(part.text for part in parts) == want.text == engine.tokenizer.decode(want.token_ids)
        assert "\ufffd" in want.text  # random bytes: some are no characters
        assert sum(part.cumulative_logprob for part in parts) == pytest.approx(want.cumulative_logprob)
        assert [part.finish_reason for part in parts] == [None] * 39 + ["length"]


def poisoned(engine, token=299):
    """While open, `token`'s embedding is infinite."""
    weights = engine.runner.weights
    infinite = weights.embed.at[token].set(np.asarray(np.inf, weights.embed.dtype))

    @contextlib.contextmanager
    def scope():
        engine.runner.weights = weights._replace(embed=infinite)
        try:
            yield
        finally:
            engine.runner.weights = weights

    return scope()


def test_an_id_is_free_again_after_an_error_too(engine, undisturbed):
    with poisoned(engine):
        engine.add_request("a", [299, *([5] * 499)], GREEDY)  # two chunks: the second is in flight when the first fails
        engine.step()
        [error] = engine.step()
        assert (error.request_id, error.finished, error.outputs[0].finish_reason) == ("a", True, "error")
        engine.add_request("a", PROMPT, GREEDY)
        outputs = collect(engine)["a"]
    assert [t for o in outputs for t in o.outputs[0].token_ids] == undisturbed.outputs[0].token_ids
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_a_branch_that_ends_as_another_fails_is_reported(engine, monkeypatch):
    """Branch 0 takes its last token in the step in which branch 1 turns out not to be finite."""
    engine.add_request("a", PROMPT, SamplingParams(seed=1, max_tokens=4, ignore_eos=True, n=2))
    complete = engine.scheduler.complete

    def failing(entry, token, finite):
        ended = bool(engine._groups) and engine._groups["a"].branches[0].finish_reason is not None
        return complete(entry, token, finite and not (entry.request.index == 1 and ended))

    monkeypatch.setattr(engine.scheduler, "complete", failing)
    outputs = [output for report in collect(engine)["a"] for output in report.outputs]
    assert [(o.index, o.finish_reason) for o in outputs if o.finish_reason] == [(0, "length"), (1, "error")]
    assert sum(len(o.token_ids) for o in outputs if o.index == 0) == 4


# ---- what is reported -----------------------------------------------------------------------------------


def test_logprobs(engine):
    hot = SamplingParams(temperature=2.0, seed=3, max_tokens=30, ignore_eos=True)
    results = {count: one(engine, PROMPT, replace(hot, logprobs=count)).outputs[0] for count in (0, 1, 5, 20)}
    greedy = one(engine, PROMPT, replace(hot, temperature=0, logprobs=5)).outputs[0]
    plain = one(engine, PROMPT, hot).outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    assert {tuple(output.token_ids) for output in results.values()} == {tuple(plain.token_ids)}
    outside = 0
    for count, output in [*results.items(), (5, greedy)]:
        assert len(output.logprobs) == 30
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert next(iter(entry)) == token
            assert all(isinstance(value, Logprob) for value in entry.values())
            sampled = entry[token].rank
            outside += sampled > count
            assert len(entry) == count + (sampled > count)
            by_rank = sorted(entry.values(), key=lambda value: value.rank)
            assert [value.rank for value in by_rank][:count] == list(range(1, count + 1))
            logprobs = [value.logprob for value in by_rank]
            assert logprobs == sorted(logprobs, reverse=True)
            assert sum(np.exp(logprobs)) <= 1 + 1e-5
            assert all(value.decoded_token == engine.tokenizer.token_text(i) for i, value in entry.items())
    assert outside > 20  # the sampled token was not always among the likeliest
    assert all(entry[token].rank == 1 for token, entry in zip(greedy.token_ids, greedy.logprobs, strict=True))
    few, many = results[5].logprobs, results[20].logprobs
    assert all(a.items() <= b.items() for a, b in zip(few, many, strict=True))


def test_branches(engine):
    params = SamplingParams(temperature=1.5, seed=9, max_tokens=10, ignore_eos=True, n=40)  # more than run at once
    result = one(engine, PROMPT, params)
    assert [output.index for output in result.outputs] == list(range(40))
    assert len({tuple(output.token_ids) for output in result.outputs}) == 40
    assert all((len(output.token_ids), output.finish_reason) == (10, "length") for output in result.outputs)
    greedy = one(engine, PROMPT, replace(params, temperature=0, n=3))
    assert len({tuple(output.token_ids) for output in greedy.outputs}) == 1


STATS = {
    "num_requests_running": int,
    "num_requests_waiting": int,
    "kv_cache_usage_perc": float,
    "num_preemptions": int,
    "prefix_cache_queries": int,
    "prefix_cache_hits": int,
    "prompt_tokens": int,
    "generation_tokens": int,
    "steps": int,
    "constrained_steps": int,
    "computed_tokens": int,
    "padding_waste": float,
    "kv_waste": float,
    "compilations": int,
    "compilations_from_cache": int,
    "compilations_after_warmup": int,
    "deterministic": str,
    "max_model_len": int,
    "num_pages": int,
    "weights_version": int,
}


def test_stats_of_a_run_computed_by_hand():
    with tiny_engine("float32", linear_backend="xla") as engine:
        fresh = engine.stats()
        assert {name: type(value) for name, value in fresh.items()} == STATS
        assert {name for name, value in fresh.items() if value} == {"deterministic", "max_model_len", "num_pages"}
        # 20 prompt tokens in one step, then two of one token each: the third token is not computed.
        engine.add_request("a", PROMPT, replace(GREEDY, max_tokens=3))
        assert engine.stats()["num_requests_waiting"] == 1
        engine.step()
        during = engine.stats()
        assert (during["num_requests_running"], during["num_requests_waiting"]) == (1, 0)
        assert during["kv_cache_usage_perc"] == pytest.approx(2 / 512)
        collect(engine)
        stats = engine.stats()
        expected = {
            "num_requests_running": 0,
            "kv_cache_usage_perc": 0.0,
            "prompt_tokens": 20,
            "generation_tokens": 3,
            "steps": 3,
            "computed_tokens": 22,
            "padding_waste": 1 - 22 / (3 * 64),
            "kv_waste": 1 - (20 + 21 + 22) / (3 * 32),
            "prefix_cache_queries": 20,
            "prefix_cache_hits": 0,
            "request_success_length": 1,
            "compilations": 3,  # admit, body of 64 tokens, head of 64 rows
        }
        assert {name: stats[name] for name in expected} == pytest.approx(expected)
        # The same again: its first page of 16 is cached. And one that is aborted.
        engine.add_request("b", PROMPT, replace(GREEDY, max_tokens=3))
        engine.add_request("c", PROMPT[:5], LONG)
        engine.step()
        engine.abort("c")
        collect(engine)
        stats = engine.stats()
        expected = {
            "prompt_tokens": 45,
            "generation_tokens": 6,
            "prefix_cache_queries": 45,
            "prefix_cache_hits": 16,
            "computed_tokens": 22 + (4 + 5) + 1 + 1,
            "steps": 6,
            "num_preemptions": 0,
            "request_success_length": 2,
            "request_success_abort": 1,
        }
        assert {name: stats[name] for name in expected} == expected
        assert set(stats) == {*STATS, "request_success_length", "request_success_abort"}
        assert (stats["deterministic"], stats["max_model_len"], stats["num_pages"]) == ("true", 512, 512)


# ---- options that do not go together --------------------------------------------------------------------


def refused(message, **options):
    """The engine does not start, and leaves no array behind."""
    tiny_decoder("float32")
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(ValueError, match=message) as error:
        tiny_engine("float32", **options)
    del error  # its traceback holds what was built so far
    gc.collect()
    assert len(jax.live_arrays()) <= before


def test_options_that_do_not_go_together():
    refused(
        "^max_num_batched_tokens=256: without enable_chunked_prefill it must be at least max_model_len=512",
        enable_chunked_prefill=False,
    )
    refused("^max_model_len=600: ", max_model_len=600)
    refused(
        r"^max_model_len=500: max_model_len must be at most the pool's 480 tokens \(num_pages=30",
        max_model_len=500,
        num_pages=30,
    )
    refused("^memory_utilization=0.9: .*num_pages=100000000000 does not", num_pages=10**11)
    refused("^memory_utilization=1e-09: .*num_pages=0 does not", memory_utilization=1e-9, num_pages=None)
    with pytest.raises(TypeError, match="either a config or options"):
        Engine(EngineConfig(), seed=1)
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        tiny_engine("float32", max_num_seq=3)


def test_determinism_that_is_not_proven(monkeypatch):
    refused(
        "^deterministic=True: it is proven up to 512 tokens in a step, not for max_num_batched_tokens=1024",
        max_num_batched_tokens=1024,
    )
    with monkeypatch.context() as patch:
        patch.setattr(determinism, "PROVEN_JAX", ("0.0.1",))
        refused("^deterministic=True: it is proven for JAX 0.0.1, not for", deterministic=True)
        with tiny_engine("float32", deterministic="auto") as engine:
            assert (engine.deterministic, engine.stats()["deterministic"]) == (False, "false")
    monkeypatch.setattr(determinism, "row_invariance", lambda *_: "a row of the head has other bits")
    refused("^deterministic=True: a row of the head has other bits")
    with tiny_engine("float32", deterministic="auto") as engine:
        assert (engine.deterministic, engine.stats()["deterministic"]) == (False, "false")


def test_the_pool_bounds_the_length():
    with tiny_engine("float32", num_pages=3) as engine:
        assert engine.max_model_len == 48
        with pytest.raises(ValueError, match="48 tokens: must be fewer than max_model_len=48"):
            engine.add_request("a", [1] * 48)


# ---- compilations ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_compilations():
    """A list that grows by one with every compilation in this process."""
    seen = []

    def listener(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_nothing_compiles_after_warm_up():
    with counted_compilations() as seen:
        with tiny_engine("float32", compile="warmup", linear_backend="xla") as engine:
            warm = engine.stats()["compilations"]
            assert warm == len(engine.runner.programs())
            assert engine.stats()["compilations_after_warmup"] == 0
            before = len(seen)
            requests = requests_for(VOCAB, 30, longest=400, max_tokens=30)
            for index, (prompt, params) in enumerate(requests):
                engine.add_request(str(index), prompt, params)
            engine.step()
            held = engine.scheduler.pool.allocate(engine.scheduler.pool.num_free)  # no page is left: preemptions
            found = collect(engine, steps=12)
            for index in (3, 11, 14):
                engine.abort(str(index))
            engine.scheduler.pool.release(held)
            for index, outputs in collect(engine).items():
                found.setdefault(index, []).extend(outputs)
            assert_idle(engine)
            assert sum(outputs[-1].finished for outputs in found.values()) == 30
            stats = engine.stats()
            assert stats["num_preemptions"] > 0
            assert stats["prefix_cache_hits"] > 0
            assert stats["request_success_abort"] > 0
            assert (stats["compilations_after_warmup"], stats["compilations"]) == (0, warm)
            assert len(seen) == before
            # Both counters can count.
            engine.runner.compiler.clear()
            one(engine, PROMPT)
            assert engine.stats()["compilations_after_warmup"] == 3
        jax.jit(lambda x: x + 2)(jnp.zeros(3)).block_until_ready()
        assert len(seen) > before


def test_lazy_compiles_what_is_used():
    with tiny_engine("float32", linear_backend="xla") as engine:
        assert engine.stats()["compilations"] == 0
        one(engine, PROMPT)
        assert engine.stats()["compilations"] == 3  # admit, body of 64 tokens, head of 64 rows
        one(engine, PROMPT[:3])
        assert engine.stats()["compilations"] == 3
        one(engine, [i % VOCAB for i in range(100)])
        assert engine.stats()["compilations"] == 4  # body of 128 tokens
        assert engine.stats()["compilations_after_warmup"] == 0


# ---- memory ---------------------------------------------------------------------------------------------


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_ten_engines_in_a_row_give_everything_back():
    """Closed or dropped, idle or in the middle of its work: arrays, memory and threads are given back."""
    sizes = []
    for index in range(10):
        engine = tiny_engine("float32", num_pages=4096)  # large, so that a lost pool stands out from what JAX keeps
        pages = sum(layer.pages.nbytes for layer in engine.runner.kv) / 2**20
        one(engine, PROMPT)
        parts = [weakref.ref(part) for part in (engine, engine.runner, engine.scheduler, engine.runner.compiler)]
        if index % 2:
            engine.add_request("a", PROMPT, LONG)
            engine.step()
            engine.step()
        if index % 4 < 2:
            engine.close()
            engine.close()
        del engine
        for thread in threading.enumerate():
            if thread.name == "jaxserve-prefetch":  # a dropped engine's ends by itself
                thread.join()
        gc.collect()
        assert [part() for part in parts] == [None] * 4
        arrays = (len(jax.live_arrays()), sum(array.nbytes for array in jax.live_arrays()))
        sizes.append((*arrays, threading.active_count(), len(os.listdir("/proc/self/task")), resident_mib()))
    assert len({size[:3] for size in sizes[2:]}) == 1
    assert sizes[-1][3] <= sizes[1][3]
    assert sizes[-1][4] - sizes[1][4] < 8 * pages * 0.8, [size[4] for size in sizes]


def test_a_closed_engine_says_so():
    engine = tiny_engine("float32")
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    engine.abort("a")
    engine.close()
    assert not engine.has_unfinished()
    for call in (engine.step, lambda: engine.add_request("b", PROMPT)):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            call()


def test_two_engines_at_once(engine):
    """They share nothing; and a refused request takes nobody's seed: unseeded requests are the same in both."""
    unseeded = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, n=2)
    with tiny_engine("float32", seed=5) as first, tiny_engine("float32", seed=5) as second:
        for request_id in "abc":
            for bad in ([], [300], None):
                with pytest.raises(ValueError, match="prompt"):
                    second.add_request("bad", bad)
            first.add_request(request_id, PROMPT, unseeded)
            second.add_request(request_id, PROMPT, unseeded)
        found = [{}, {}]
        while first.has_unfinished() or second.has_unfinished():
            for one_found, other in zip(found, (first, second), strict=True):
                for output in other.step():
                    for branch in output.outputs:
                        one_found.setdefault((output.request_id, branch.index), []).extend(branch.token_ids)
        assert found[0] == found[1]
        assert len({tuple(tokens) for tokens in found[0].values()}) == 6
        for other in (first, second):
            assert_idle(other)
    with tiny_engine("float32", seed=6) as third:
        assert one(third, PROMPT, unseeded).outputs[0].token_ids != found[0]["a", 0]
