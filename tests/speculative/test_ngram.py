"""Prompt lookup against a search in plain Python."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ngram_tools import search

from jaxserve.speculative.ngram import NgramProposer

MAX_LEN = 40


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_LEN - 2), min_size=3, max_size=3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 5),
)
def test_it_finds_what_a_plain_search_finds(rows, shortest, more, junk):
    proposer = NgramProposer(shortest, shortest + more, 5)
    history = np.full((3, MAX_LEN), junk, np.int32)  # what stands behind the known tokens must not matter
    for row, tokens in zip(history, rows, strict=True):
        row[: len(tokens)] = tokens
    lengths = jnp.array([len(tokens) for tokens in rows], jnp.int32)
    proposed, found = proposer.propose(jnp.asarray(history), lengths)
    for row, tokens in enumerate(rows):
        expected = search(tokens, shortest, shortest + more, 5)
        assert bool(found[row]) == (expected is not None)
        if expected is not None:
            assert proposed[row].tolist() == expected


def test_a_text_that_repeats_itself_is_expected_to_go_on():
    proposed, found = NgramProposer(2, 4, 7).propose(
        jnp.array([[5, 1, 2, 3, 1, 2, 3, 1, 0, 0]], jnp.int32), jnp.array([8], jnp.int32)
    )
    assert found.tolist() == [True]
    assert proposed.tolist() == [[2, 3, 1, 2, 3, 1, 2]]
