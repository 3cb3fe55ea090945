"""The filters: both ways against each other, to the last bit, and against a float64 brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels_pallas.verify_draft import filters
from jaxserve.sampling_params import SamplingParams
from tests.sampling.helpers import exact_distribution, rows_of


@jax.jit
def kept_tokens(distances, filtering):
    """Every token asked by itself: [rows, vocab]."""
    nucleus = filters.Nucleus.of(distances, filtering)
    return jax.lax.map(lambda at: nucleus.keeps(distances, at), distances.T).T


def candidate_limits(distances, filtering, width):
    vocab = distances.shape[1]
    limb = filters.limb_bits(vocab)
    near = jnp.sort(distances, axis=1)[:, :width]
    whole = lambda: filters.mass(filters.weights(distances, limb), distances <= filtering.furthest[:, None], limb)
    return near, filters.candidate_limits(near, filtering, vocab, whole)


candidate_limits = jax.jit(candidate_limits, static_argnums=2)


def distributions(rng, kind: str, shape) -> np.ndarray:
    """Logits of many forms, ties among them."""
    normal = rng.normal(size=shape)
    return {
        "flat": normal * 0.01,
        "normal": normal * 2,
        "peaked": normal * 8,
        "tied": np.round(normal * 2),
        "equal": np.zeros(shape),
        "masked": np.where(rng.random(shape) < 0.9, -np.inf, normal),
    }[kind].astype(np.float32)


# As dicts: beartype's checks of a SamplingParams draw random numbers, which hypothesis forbids in a strategy.
parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.01, 0.3, 0.8, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 3, 7, 8, 9, 20, 100, 10**6]),
        "top_p": st.sampled_from([1.0, 1e-12, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2**-24]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.3, 1.0]),
    }
)
kinds = st.sampled_from(["flat", "normal", "peaked", "tied", "equal", "masked"])


def filter_rows(params, vocab):
    rows = rows_of(params)
    return filters.FilterRows.of(rows.top_k, rows.top_p, rows.min_p, vocab)


@pytest.mark.parametrize("vocab", [6, 128, 1000])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(params=st.lists(parameters, min_size=8, max_size=8), kind=kinds, seed=st.integers(0, 2**32 - 1))
def test_candidates_and_whole_rows_keep_the_same_tokens(vocab, params, kind, seed):
    params = [SamplingParams(**values) for values in params]
    logits = distributions(np.random.default_rng(seed), kind, (8, vocab))
    logits[:, 0] = np.maximum(logits[:, 0], -1)
    temperature = np.array([[p.temperature] for p in params], np.float32)
    distances = jnp.asarray((logits.max(1, keepdims=True) - logits) / temperature)
    filtering = filter_rows(params, vocab)
    near, found = candidate_limits(distances, filtering, min(9, vocab))
    exact = np.asarray(kept_tokens(distances, filtering)) & np.isfinite(distances)
    limits = np.where(exact, distances, -1).max(1, keepdims=True)
    np.testing.assert_array_equal(exact, (np.asarray(distances) <= limits))  # all up to the furthest
    suffices = np.asarray(found.suffices)
    np.testing.assert_array_equal(np.asarray(found.kept)[suffices], (np.asarray(near) <= limits)[suffices])
    np.testing.assert_array_equal(np.asarray(found.kept).sum(1)[suffices], exact.sum(1)[suffices])
    # Only need sends a row the long way: it keeps more than the candidates, or top_k, with its ties, may.
    fits = exact.sum(1) < min(9, vocab)
    assert (suffices | ~fits | (np.asarray(filtering.top_k) < vocab)).all()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(params=parameters, kind=kinds, seed=st.integers(0, 2**32 - 1))
def test_whole_rows_keep_what_brute_force_keeps(params, kind, seed):
    params = SamplingParams(**params)
    logits = distributions(np.random.default_rng(seed), kind, (1, 300))
    temperature = np.float32(params.temperature)
    distances = (logits.max() - logits) / temperature
    kept = np.asarray(kept_tokens(jnp.asarray(distances), filter_rows([params], 300)))[0] & np.isfinite(logits[0])
    certain = []
    for nudge in (-1e-5, 1e-5):  # where a hair's breadth of a parameter changes the answer, either is right
        nudged = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=min(1.0, max(1e-13, params.top_p * (1 + nudge))) if params.top_p < 1 else 1.0,
            min_p=min(1.0, params.min_p * (1 - nudge)),
        )
        certain.append(exact_distribution(logits[0], nudged) > 0)
    assert (kept >= (certain[0] & certain[1])).all()
    assert (kept <= (certain[0] | certain[1])).all()


def test_vllms_order_top_p_counts_what_top_k_left():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    distances = jnp.asarray(logits.max() - logits)
    # Of the two tokens that top_k leaves, the first has 4/7: enough for 0.5, which it is not of the whole.
    assert kept_tokens(distances, filter_rows([SamplingParams(top_k=2, top_p=0.5)], 4)).tolist() == [
        [True, False, False, False]
    ]
    assert kept_tokens(distances, filter_rows([SamplingParams(top_p=0.5)], 4)).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("vocab", [2, 128, 49152, 131072, 151936, 262144])
def test_masses_of_the_flattest_rows_do_not_overflow(vocab):
    limb = filters.limb_bits(vocab)
    weight = filters.weights(jnp.zeros((1, vocab), jnp.float32), limb)
    total = filters.mass(weight, jnp.ones((1, vocab), bool), limb)
    exact = int(weight[0, 0]) * vocab
    assert int(total.high[0]) * 2**limb + int(total.low[0]) == exact
    np.testing.assert_allclose(filters.to_float(total, limb), vocab, rtol=1e-6)
