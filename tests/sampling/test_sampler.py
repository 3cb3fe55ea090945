"""The sampler: its distribution, its edges, and a row's independence of the other rows, bit for bit."""

import itertools

import jax
import numpy as np
import pytest
import scipy.stats

from jaxserve.sampling_params import SamplingParams
from tests.sampling.helpers import (
    VOCAB,
    by_candidates,
    by_few,
    by_whole_rows,
    exact_distribution,
    many_samples,
    rows_of,
)

# The whole family of chi-square tests fails by chance with this probability (Bonferroni); seeds are fixed.
FAMILY_ALPHA = 1e-3
WIDE = 2500  # more blocks than candidates, the last one short
FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_k": 100},
    {"top_p": 0.7},
    {"top_p": 0.99},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 3.0, "top_k": 150, "top_p": 0.97, "min_p": 0.001},
]
SHAPES = {"normal": 2.0, "flat": 0.1}


def some_logits(spread: float, vocab: int = VOCAB, rows: int | None = None) -> np.ndarray:
    shape = vocab if rows is None else (rows, vocab)
    return (np.random.default_rng(1).normal(size=shape) * spread).astype(np.float32)


@pytest.mark.parametrize("spread", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_distribution(given, spread):
    logits, params = some_logits(spread), SamplingParams(seed=11, **given)
    expected = exact_distribution(logits, params)
    counts = np.bincount(many_samples(logits, params, 10_000), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    expected = expected * counts.sum()
    rare = expected < 10  # pooled, as the chi-square approximation asks
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert scipy.stats.chisquare(observed, wanted).pvalue > FAMILY_ALPHA / (len(FILTERS) * len(SHAPES))


@pytest.mark.parametrize("pair", ["positions", "seeds"])
def test_neighbouring_draws_are_independent(pair):
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    draws = many_samples(logits, SamplingParams(seed=21), 20_001)
    others = draws[1:] if pair == "positions" else many_samples(logits, SamplingParams(seed=22), 20_000)
    table = np.zeros((4, 4))
    np.add.at(table, (draws[:20_000], others), 1)
    assert scipy.stats.chi2_contingency(table).pvalue > FAMILY_ALPHA


def mixed_params(count: int) -> list[SamplingParams]:
    """Every kind of request, greedy ones and wide filters among them."""
    kinds = [{"temperature": 0}, {"temperature": 1e-4}, *FILTERS]
    return [SamplingParams(seed=100 + i, **kind) for i, kind in zip(range(count), itertools.cycle(kinds))]


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_a_rows_token_does_not_depend_on_the_others(spread):
    count = 64 if spread > 1 else 32  # rows that keep many tokens take long
    logits = some_logits(spread, WIDE, rows=count)
    params, positions = mixed_params(count), np.arange(count, dtype=np.int32) * 7
    together = np.asarray(by_candidates(logits, rows_of(params), positions))
    order = np.random.default_rng(2).permutation(count)
    shuffled = by_candidates(logits[order], rows_of([params[i] for i in order]), positions[order])
    np.testing.assert_array_equal(shuffled, together[order])
    for size in (8, 16, count // 2):
        for start in range(0, count, size):
            part = slice(start, start + size)
            alone = by_candidates(logits[part], rows_of(params[part]), positions[part])
            np.testing.assert_array_equal(alone, together[part])
    idle = SamplingParams(temperature=0)
    for index in range(0, count, 3):  # alone among greedy rows, elsewhere in the batch
        company = rows_of([idle] * 5 + [params[index]] + [idle] * 2)
        alone = by_candidates(np.tile(logits[index], (8, 1)), company, np.full(8, positions[index], np.int32))
        assert alone[5] == together[index]


@pytest.mark.parametrize("vocab", [50, WIDE])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 3.0, 10.0])
def test_the_ways_agree(vocab, spread):
    logits, rows = some_logits(spread, vocab, rows=64), rows_of(mixed_params(64))
    for start in range(4):
        positions = np.arange(64, dtype=np.int32) + 64 * start
        expected = by_candidates(logits, rows, positions)
        np.testing.assert_array_equal(by_whole_rows(logits, rows, positions), expected)
        if vocab == WIDE:
            np.testing.assert_array_equal(by_few(logits, rows, positions), expected)


def test_greedy_takes_the_lowest_of_equal_logits():
    logits = np.zeros((8, VOCAB), np.float32)
    for row, ids in enumerate([(3, 4), (31, 32), (32, 199), (199,), (0, 50), (50, 51), (64, 75), ()]):
        logits[row, list(ids)] = 1
    tokens = by_candidates(logits, rows_of([SamplingParams(temperature=0)] * 8), np.zeros(8, np.int32))
    np.testing.assert_array_equal(tokens, [3, 31, 32, 199, 0, 50, 64, 0])


def test_a_tiny_temperature_is_greedy():
    logits = some_logits(1.0, rows=8)
    params = [SamplingParams(temperature=t, top_p=p) for t in (1e-4, 1e-30, 1e-45, 0.0099) for p in (0.9, 1)]
    tokens = by_candidates(logits, rows_of(params), np.arange(8, dtype=np.int32))
    np.testing.assert_array_equal(tokens, logits.argmax(1))


def test_the_coldest_sampled_temperature_is_finite():
    logits = np.array([1e30, -1e30, 0, 5], np.float32)
    assert set(many_samples(logits, SamplingParams(temperature=0.01), 1000)) == {0}


@pytest.mark.parametrize("given", [{}, {"top_k": 3}, {"top_p": 0.999}, {"temperature": 50.0}], ids=str)
@pytest.mark.parametrize("sampler", [by_candidates, by_whole_rows])
def test_masked_tokens_are_never_drawn(given, sampler):
    logits = np.full(VOCAB, -np.inf, np.float32)
    allowed = [5, 40, 77, 198]
    logits[allowed] = [0.0, -3.0, 1.0, -20.0]
    drawn = many_samples(logits, SamplingParams(seed=1, **given), 4000, sampler=sampler)
    assert set(drawn) <= set(allowed)
    alone = np.where(np.arange(VOCAB) == 198, logits, -np.inf)
    assert set(many_samples(alone, SamplingParams(seed=1, **given), 2000, sampler=sampler)) == {198}


def test_tokens_of_no_probability_are_never_drawn():
    logits = np.full(VOCAB, -110.0, np.float32)
    logits[[7, 160]] = 0
    assert set(many_samples(logits, SamplingParams(seed=2), 5000)) == {7, 160}


def test_tokens_that_tie_with_the_last_one_kept_stay():
    logits = np.array([2, 1, 1, 1, 0, 0], np.float32)
    for params in (SamplingParams(top_k=2, seed=3), SamplingParams(top_p=0.5, seed=3)):
        assert set(many_samples(logits, params, 2000)) == {0, 1, 2, 3}


def test_junk_logits_still_give_a_token_id():
    params = [SamplingParams(**kind) for kind in FILTERS[:8]]
    for value in (np.nan, np.inf, -np.inf):
        logits = np.full((8, VOCAB), value, np.float32)
        tokens = np.asarray(by_candidates(logits, rows_of(params), np.arange(8, dtype=np.int32)))
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


@pytest.mark.parametrize("setting", [jax.enable_x64, lambda on: jax.default_prng_impl("rbg")], ids=["x64", "rbg"])
def test_the_users_settings_change_nothing(setting):
    logits, rows, positions = some_logits(1.0, rows=8), rows_of(mixed_params(8)), np.arange(8, dtype=np.int32)
    expected = by_candidates(logits, rows, positions)
    with setting(True):
        tokens = by_candidates(logits, rows, positions)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("sampler", [by_candidates, by_whole_rows])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_end_and_disturb_no_other(sampler, value):
    """Their requests end with an error of their own; the sampler must only come to an end."""
    params = SamplingParams(temperature=0.9, top_p=0.3, top_k=90, seed=1)
    logits = np.random.default_rng(0).normal(size=(256, VOCAB)).astype(np.float32)
    positions = np.arange(256, dtype=np.int32)
    expected = np.asarray(sampler(logits, rows_of([params] * 256), positions))
    logits[::2] = value
    logits[1::4, 7] = -np.inf
    found = np.asarray(sampler(logits, rows_of([params] * 256), positions))
    np.testing.assert_array_equal(found[3::4], expected[3::4])
    assert ((found >= 0) & (found < VOCAB)).all()
