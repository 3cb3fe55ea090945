"""Requests that speculate, for the tests of both implementations."""

from typing import NamedTuple

import numpy as np

from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows
from jaxserve.sampling_params import SamplingParams
from tests.sampling.helpers import by_candidates, rows_of

KINDS = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 0.5},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


class Case(NamedTuple):
    """Arguments of `verify_draft`, and the target's own samples at every position."""

    logits: np.ndarray
    draft_tokens: np.ndarray
    num_drafts: np.ndarray
    rows: SamplingRows
    positions: np.ndarray
    samples: np.ndarray

    @property
    def arguments(self):
        return self[:-1]


def params_of(count: int, kinds=KINDS) -> list[SamplingParams]:
    return [SamplingParams(seed=100 + i, **kinds[i % len(kinds)]) for i in range(count)]


def make_case(
    count: int, width: int, vocab: int, *, spread: float = 2.0, seed: int = 0, kinds=KINDS, raised: slice = slice(0)
) -> Case:
    """Drafts agree with the samples up to a random place; what stands behind `num_drafts` is junk."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(count, width, vocab)) * spread).astype(np.float32)
    logits[..., raised] += 10
    rows = rows_of(params_of(count, kinds))
    positions = rng.integers(0, 1000, count).astype(np.int32)
    samples = [by_candidates(logits[:, i], rows, positions + np.int32(i)) for i in range(width)]
    samples = np.stack(samples, axis=1)
    agreeing = rng.integers(0, width, count)
    steps = np.arange(width - 1)
    wrong = (samples[:, :-1] + 1) % vocab
    drafts = np.where(steps < agreeing[:, None], samples[:, :-1], wrong).astype(np.int32)
    num_drafts = rng.integers(0, width, count).astype(np.int32)
    drafts = np.where(steps < num_drafts[:, None], drafts, rng.integers(-1, vocab, drafts.shape)).astype(np.int32)
    return Case(logits, drafts, num_drafts, rows, positions, samples)
