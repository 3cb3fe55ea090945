"""Parameters in rows, and the sampler's definition in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows, sample
from jaxserve.sampling_params import SamplingParams, seed_words

VOCAB = 200

by_candidates = jax.jit(sample)
by_whole_rows = jax.jit(functools.partial(sample, candidates=0))
by_few = jax.jit(functools.partial(sample, candidates=4))


def rows_of(params: list[SamplingParams]) -> SamplingRows:
    def column(values, dtype):
        return jnp.asarray(np.array(values, dtype))

    return SamplingRows(
        temperature=column([p.temperature for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float32),
        min_p=column([p.min_p for p in params], np.float32),
        seed=column([seed_words(p.seed or 0) for p in params], np.uint32),
        wants_logprobs=column([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
    )


def many_samples(logits, params: SamplingParams, count: int, sampler=by_candidates) -> np.ndarray:
    """Samples of one distribution over at most VOCAB tokens at `count` positions of one request."""
    rows = 256
    padded = np.full((rows, VOCAB), -np.inf, np.float32)  # one shape, one compilation
    padded[:, : len(logits)] = logits
    parameters = rows_of([params] * rows)
    starts = np.arange(0, count, rows, dtype=np.int32)
    steps = [sampler(padded, parameters, start + np.arange(rows, dtype=np.int32)) for start in starts]
    return np.concatenate(steps)[:count]


def exact_distribution(logits, params: SamplingParams) -> np.ndarray:
    """What the sampler must draw from, in float64: min_p, top_k, top_p on the scaled distribution."""
    scaled = np.asarray(logits, np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    kept = p >= params.min_p
    if 0 < params.top_k < len(p):
        kept &= p >= np.sort(p)[-params.top_k]
    p = np.where(kept, p, 0)
    if params.top_p < 1:
        likelier = np.array([p[p > own].sum() for own in p])
        p = np.where(likelier < params.top_p * p.sum(), p, 0)
    return p / p.sum()
