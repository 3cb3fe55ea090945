"""Block-wise argmax and top-k against NumPy, with ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels_pallas.verify_draft import blocks

top_logits = jax.jit(blocks.top_logits, static_argnums=1)
largest = jax.jit(blocks.largest)


@pytest.mark.parametrize("vocab", [1, 31, 32, 128, 1000, 3001])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), levels=st.sampled_from([1, 2, 5, 50, 10**6]))
def test_largest_and_top_match_numpy(vocab, seed, levels):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-levels, levels, (8, vocab)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    order = np.argsort(-logits, axis=1, kind="stable")
    ids, maximum = largest(jnp.asarray(logits))
    np.testing.assert_array_equal(ids, order[:, 0])
    np.testing.assert_array_equal(maximum, logits.max(axis=1))
    for k in (1, 9, 65):
        top = top_logits(jnp.asarray(logits), min(k, vocab))
        np.testing.assert_array_equal(top.logits, np.take_along_axis(logits, order, 1)[:, :k])
        np.testing.assert_array_equal(top.ids, order[:, :k])
