"""Requests that speculate, for the tests of both implementations."""

from typing import NamedTuple

import jax
import numpy as np

from jaxserve.kernels_pallas.verify_draft import DraftLogits, DraftRows
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
    """Runs of equal width behind each other: arguments of `verify_draft`, and the target's own samples."""

    logits: np.ndarray  # [count * width, vocab]
    rows: SamplingRows
    positions: np.ndarray
    drafts: DraftRows
    samples: np.ndarray  # [count * width]

    @property
    def arguments(self):
        return self[:-1]

    def yielded(self, tokens) -> list[list[int]]:
        """The tokens of each run that count: those up to the first that is not the draft behind it."""
        number, token, real = map(np.asarray, self.drafts)
        runs, going_on = [], True
        for row, yielded in enumerate(np.asarray(tokens).tolist()):
            if number[row] == 0:
                runs.append([])
                going_on = True
            else:
                going_on = going_on and bool(real[row]) and token[row] == runs[-1][-1]
            if going_on:
                runs[-1].append(yielded)
        return runs


def params_of(count: int, kinds=KINDS) -> list[SamplingParams]:
    return [SamplingParams(seed=100 + i, **kinds[i % len(kinds)]) for i in range(count)]


def make_case(
    count: int, width: int, vocab: int, *, spread: float = 2.0, seed: int = 0, kinds=KINDS, raised: slice = slice(0)
) -> Case:
    """Drafts agree with the samples up to a random place; what stands where no draft is real is junk."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(count, width, vocab)) * spread).astype(np.float32)
    logits[..., raised] += 10
    steps = np.arange(width, dtype=np.int32)
    positions = (rng.integers(0, 1000, count)[:, None] + steps).astype(np.int32)
    rows = rows_of(params_of(count, kinds))
    samples = np.stack([by_candidates(logits[:, i], rows, positions[:, i]) for i in range(width)], axis=1)
    right = steps[:-1] < rng.integers(0, width, count)[:, None]
    drafts = np.where(right, samples[:, :-1], (samples[:, :-1] + 1) % vocab)
    real = steps <= rng.integers(0, width, count)[:, None]
    drafts = np.where(real[:, 1:], drafts, rng.integers(-1, vocab, drafts.shape))
    token = np.concatenate([np.full((count, 1), -1), drafts], axis=1).astype(np.int32).reshape(-1)
    flat = DraftRows(np.tile(steps, count), token, real.reshape(-1))
    repeated = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), width, axis=0), rows)
    return Case(logits.reshape(-1, vocab), repeated, positions.reshape(-1), flat, samples.reshape(-1))


def sampled_drafts(case: Case, seed: int = 3) -> DraftLogits:
    """Logits near the target's, as a proposer that samples has them, in another order than the rows."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(case.logits)).astype(np.int32)
    logits = np.empty_like(case.logits)
    logits[order] = np.roll(case.logits, 1, axis=0) + rng.normal(size=case.logits.shape).astype(np.float32)
    return DraftLogits(logits, order)
