"""Intervals and the paired test against SciPy and against what they must do."""

import numpy as np
import pytest
from scipy import stats

from jaxserve.evaluation.metrics import mean_of, total_of
from jaxserve.evaluation.statistics import bootstrap, paired


def scored(values):
    return np.stack([np.asarray(values, float), np.ones(len(values))], -1)


def test_the_interval_of_a_mean_is_as_wide_as_it_must_be():
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = bootstrap(scored(values), mean_of, samples=2000, seed=0)
    expected = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(0))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval), abs=0.03)


def test_an_interval_depends_on_its_seed_alone():
    values = scored(np.random.default_rng(2).random(50))
    first, again, other = (bootstrap(values, mean_of, samples=100, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 5), (1, 6), (3, 3), (2, 9), (12, 30)])
def test_right_or_wrong_is_tested_as_mcnemar_does(only_a, only_b):
    """Exactly where few items differ, within the error of 10,000 swaps elsewhere."""
    a = [1] * only_a + [0] * only_b + [1] * 40 + [0] * 7
    b = [0] * only_a + [1] * only_b + [1] * 40 + [0] * 7
    found = paired(scored(a), scored(b), mean_of, samples=500, seed=0)
    expected = stats.binomtest(min(only_a, only_b), only_a + only_b).pvalue
    exact = only_a + only_b <= 13
    assert found.p_value == pytest.approx(expected, abs=1e-12 if exact else 0.005)
    assert (found.num_items, found.num_different) == (len(a), only_a + only_b)
    assert found.value == pytest.approx((only_b - only_a) / len(a))
    assert found.low <= found.value <= found.high


def test_other_scores_are_tested_by_permutation():
    random = np.random.default_rng(4)
    a, b = random.random(10), random.random(10) + 0.15
    found = paired(scored(a), scored(b), mean_of, samples=500, seed=0)
    expected = stats.permutation_test((b, a), lambda x, y: np.mean(x) - np.mean(y), permutation_type="samples")
    assert found.p_value == pytest.approx(expected.pvalue, abs=2e-3)  # all 1024 in both


def test_a_run_does_not_differ_from_itself():
    values = np.array([[-20.0, 5], [-3.0, 2], [-8.0, 3]])
    found = paired(values, values, total_of("perplexity"), samples=100, seed=0)
    assert (found.value, found.low, found.high, found.p_value, found.num_different) == (0, 0, 0, 1, 0)


@pytest.mark.parametrize("seed", range(8))
def test_large_perplexities_are_tested_as_small_ones(seed):
    """Where A is better everywhere only it and its mirror image part the runs as much, whatever rounding does."""
    random = np.random.default_rng(seed)
    better = np.stack([-8 * random.uniform(50, 60, 7), random.uniform(50, 60, 7).round()], -1)
    worse = better - np.stack([random.uniform(0.1, 9, 7), np.zeros(7)], -1)
    assert paired(better, worse, total_of("perplexity"), samples=10, seed=0).p_value == 2 / 2**7


def test_perplexity_is_that_of_all_items_together():
    better = np.stack([np.full(12, -10.0), np.full(12, 5)], -1)
    found = paired(better - [0.5, 0], better, total_of("perplexity"), samples=100, seed=0)
    assert found.value == pytest.approx(np.exp(2.0) - np.exp(2.1))
    assert found.p_value == pytest.approx(2 / 2**12)
