"""Confidence intervals and the paired test, over the vectors of items (see `metrics.py`)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Total = Callable[[np.ndarray], np.ndarray]
EXACT_ITEMS = 13  # so many items that differ, or fewer, are swapped in every way there is


class Estimate(NamedTuple):
    """A value and the 95 % interval of it."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """Of B minus A on the same items: the value, its 95 % interval, and how likely chance gives as much."""

    value: float
    low: float
    high: float
    p_value: float
    num_items: int
    num_different: int


def bootstrap(vectors: np.ndarray, total: Total, *, samples: int, seed: int) -> Estimate:
    """The value over all items ([items, k]) and its percentile interval over resampled items."""
    drawn = total(_counts(len(vectors), samples, seed) @ vectors)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(float(total(vectors.sum(0))), float(low), float(high))


def paired(a: np.ndarray, b: np.ndarray, total: Total, *, samples: int, seed: int) -> Difference:
    """Compares two runs over the same items ([items, k] each).

    The test swaps the answers of A and B item by item: p is the share of swaps, all of them for up to 13 items that
    differ and else 10,000 random ones beside the given one, that part A and B at least as much (two-sided; for
    right-or-wrong scores the exact one is McNemar's). The interval resamples items.
    """
    counts = _counts(len(a), samples, seed)
    drawn = total(counts @ b) - total(counts @ a)
    low, high = np.quantile(drawn, (0.025, 0.975))
    ends = np.array([total(a.sum(0)), total(b.sum(0))])
    value = float(ends[1] - ends[0])
    differs = (a != b).any(-1)
    swaps = _swaps(int(differs.sum()), seed)
    change = swaps @ (b - a)[differs]  # what B loses to A in each swap
    parted = total(b.sum(0) - change) - total(a.sum(0) + change)
    slack = 1e-9 * np.abs(ends).max()  # by rounding, equal swaps are not quite equal
    p_value = float((np.abs(parted) >= abs(value) - slack).mean())
    return Difference(value, float(low), float(high), p_value, len(a), int(differs.sum()))


def _counts(items: int, samples: int, seed: int) -> np.ndarray:
    """How often each item is drawn in each sample, [samples, items]."""
    return np.random.default_rng(seed).multinomial(items, np.full(items, 1 / items), size=samples)


def _swaps(items: int, seed: int) -> np.ndarray:
    """Which items are swapped, [swaps, items], zeros and ones; the first swaps none."""
    if items <= EXACT_ITEMS:
        return (np.arange(2**items)[:, None] >> np.arange(items)) & 1
    drawn = np.random.default_rng(seed).integers(0, 2, (10_000, items))
    return np.concatenate([np.zeros((1, items), drawn.dtype), drawn])
