"""Logprobs of the raw distribution against float64, their order, and independence of the other rows."""

import jax
import numpy as np
import pytest
import scipy.special

from jaxserve.kernels_pallas.verify_draft.logprobs import logprobs

compute = jax.jit(logprobs, static_argnums=2, static_argnames="branches")


def some_logits(vocab: int, spread: float, rows: int = 8) -> np.ndarray:
    return (np.random.default_rng(vocab).normal(size=(rows, vocab)) * spread).astype(np.float32)


@pytest.mark.parametrize("vocab", [5, 128, 1000, 49152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_match_float64(vocab, spread):
    logits = some_logits(vocab, spread)
    tokens = np.random.default_rng(3).integers(0, vocab, 8).astype(np.int32)
    found = compute(logits, tokens, 20, np.full(8, 20, np.int32))
    exact = scipy.special.log_softmax(logits.astype(np.float64), axis=1)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_allclose(found.token_logprob, exact[np.arange(8), tokens], atol=2e-5)
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(exact, order, 1), atol=2e-5)
    np.testing.assert_array_equal(found.top_ids, order)
    own = logits[np.arange(8), tokens][:, None]
    np.testing.assert_array_equal(found.rank, 1 + (logits > own).sum(1))


def test_ties_are_listed_by_id_and_share_a_rank():
    logits = np.zeros((8, 1000), np.float32)
    logits[:, [700, 10, 300]] = 1
    found = compute(logits, np.full(8, 300, np.int32), 5, np.full(8, 5, np.int32))
    np.testing.assert_array_equal(found.top_ids, [[10, 300, 700, 0, 1]] * 8)
    np.testing.assert_array_equal(found.rank, 1)
    below = compute(logits, np.full(8, 999, np.int32), 5, np.full(8, 5, np.int32))
    np.testing.assert_array_equal(below.rank, 4)


@pytest.mark.parametrize("wanted", [-1, 0, 3])
def test_only_what_is_wanted(wanted):
    logits, tokens = some_logits(1000, 1.0), np.arange(8, dtype=np.int32)
    found = compute(logits, tokens, 5, np.array([wanted] * 8, np.int32))
    assert bool((found.token_logprob != 0).all()) == (wanted >= 0)
    if wanted < 0:
        assert all(not np.asarray(leaf).any() for leaf in found)
    assert found.top_ids.shape == (8, 5)
    without = compute(logits, tokens, 5, np.array([wanted] * 8, np.int32), branches=False)
    same = zip(found, without, strict=True) if wanted else zip(found[:2], without[:2], strict=True)
    for one, other in same:
        np.testing.assert_array_equal(one, other)


def test_masked_tokens_have_minus_infinity():
    logits = np.full((8, 100), -np.inf, np.float32)
    logits[:, [3, 4]] = 1.0
    found = compute(logits, np.full(8, 4, np.int32), 3, np.full(8, 3, np.int32))
    np.testing.assert_allclose(found.token_logprob, np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(found.top_logprobs, [[np.log(0.5), np.log(0.5), -np.inf]] * 8, rtol=1e-6)


def test_a_rows_values_do_not_depend_on_the_others():
    logits, tokens = some_logits(1000, 3.0, rows=64), np.arange(64, dtype=np.int32)
    wanted = np.resize(np.array([5, 0, 20, -1], np.int32), 64)
    together = compute(logits, tokens, 20, wanted)
    for size in (8, 16, 32):
        for start in range(0, 64, size):
            part = slice(start, start + size)
            alone = compute(logits[part], tokens[part], 20, wanted[part])
            mine = wanted[part] >= 0
            for one, all_ in zip(alone, together, strict=True):
                np.testing.assert_array_equal(one[mine], all_[part][mine])


def test_works_under_x64():
    logits, tokens = some_logits(1000, 1.0), np.arange(8, dtype=np.int32)
    expected = compute(logits, tokens, 5, np.full(8, 5, np.int32))
    with jax.enable_x64(True):
        found = compute(logits, tokens, 5, np.full(8, 5, np.int32))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert {leaf.dtype.name for leaf in found} == {"float32", "int32"}
