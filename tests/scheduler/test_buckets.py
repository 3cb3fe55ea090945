"""The shapes of a step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduler.buckets import ROW_MULTIPLE, Buckets

options = st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([ROW_MULTIPLE, 16, 64]))


@given(options)
def test_sizes_ascend_from_the_smallest_to_just_over_the_maximum(options):
    tokens, rows, smallest = options
    buckets = Buckets.make(tokens, rows, smallest)
    for sizes, largest in ((buckets.tokens, tokens), (buckets.rows, rows)):
        assert sizes[0] == smallest
        assert all(size % ROW_MULTIPLE == 0 for size in sizes)
        assert sizes[-1] == max(-(-largest // ROW_MULTIPLE) * ROW_MULTIPLE, smallest)
        # A step pads by less than half, and there are about log2 programs.
        assert all(a < b <= 2 * a for a, b in pairwise(sizes))


def test_examples():
    assert Buckets.make(100, 5) == Buckets(tokens=(8, 16, 32, 64, 104), rows=(8,))
    assert Buckets.make(128, 64, 64) == Buckets(tokens=(64, 128), rows=(64,))
    assert Buckets.make(1, 65, 64) == Buckets(tokens=(64,), rows=(64, 72))


@given(options, st.data())
def test_a_bucket_is_the_smallest_that_holds_the_step(options, data):
    buckets = Buckets.make(*options)
    for sizes, bucket_of in ((buckets.tokens, buckets.token_bucket), (buckets.rows, buckets.row_bucket)):
        count = data.draw(st.integers(1, sizes[-1]))
        assert bucket_of(count) == min(size for size in sizes if size >= count)


@given(options)
def test_more_than_the_largest_is_an_error_that_names_both(options):
    buckets = Buckets.make(*options)
    for sizes, bucket_of in ((buckets.tokens, buckets.token_bucket), (buckets.rows, buckets.row_bucket)):
        with pytest.raises(ValueError, match=f"{sizes[-1] + 1} rows do not fit the largest bucket {sizes[-1]}"):
            bucket_of(sizes[-1] + 1)


@given(options, st.data())
def test_exact_fit_takes_all_or_fills_a_bucket_when_that_pads_less(options, data):
    buckets = Buckets.make(*options)
    demand = data.draw(st.integers(1, buckets.tokens[-1]))
    at_least = data.draw(st.integers(0, demand))
    taken = buckets.exact_fit(demand, at_least)
    assert at_least <= taken <= demand
    if taken == demand:
        lower = max((size for size in buckets.tokens if size <= demand), default=None)
        padding = buckets.token_bucket(demand) - demand
        assert lower is None or lower < at_least or padding <= demand - lower
    else:
        assert taken in buckets.tokens
        assert demand - taken < buckets.token_bucket(demand) - demand


def test_exact_fit_examples():
    buckets = Buckets((8, 16, 32), (8,))
    assert buckets.exact_fit(17, 1) == 16  # 1 token waits instead of 15 rows of padding
    assert buckets.exact_fit(17, 17) == 17
    assert buckets.exact_fit(24, 1) == 24  # 8 rows of padding, 8 tokens would wait
    assert buckets.exact_fit(5, 1) == 5
    assert buckets.exact_fit(33, 1) == 32
