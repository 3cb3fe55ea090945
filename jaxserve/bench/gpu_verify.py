"""Sections of `gpu_check` about sampling and the verification of drafts."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.gpu_kernels import interpretation, random
from jaxserve.bench.gpu_sizes import Sizes
from jaxserve.bench.report import Report
from jaxserve.kernels_pallas.verify_draft import benchmark, mosaic, reference
from jaxserve.kernels_pallas.verify_draft.benchmark import KINDS, Shape, floors
from jaxserve.kernels_pallas.verify_draft.logprobs import logprobs
from jaxserve.kernels_pallas.verify_draft.passes import Config
from jaxserve.kernels_pallas.verify_draft.reference import each
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows

_LOGPROBS = 4
# Of the rows in turn; the first are greedy.
_TEMPERATURE = (0.0, 1.0, 0.7, 1.0, 1.5, 1.0)
_TOP_K = (0, 0, 0, 5, 40, 0)
_TOP_P = (1.0, 1.0, 0.9, 1.0, 0.9, 1.0)
_MIN_P = (0.0, 0.0, 0.0, 0.0, 0.0, 0.1)


class Drafted(NamedTuple):
    """Rows of logits, and the tokens that the kernel samples at each of their positions in a plain step."""

    logits: jax.Array  # [rows, width, vocab]
    rows: SamplingRows
    positions: jax.Array
    samples: np.ndarray  # [rows, width]

    def drafts(self, wrong: bool) -> np.ndarray:
        """What was sampled, with the draft that follows ever more of them off by one if `wrong`."""
        count, width, vocab = self.logits.shape
        off = np.arange(width - 1) == (np.arange(count) % width)[:, None]
        return np.where(off & wrong, (self.samples[:, :-1] + 1) % vocab, self.samples[:, :-1]).astype(np.int32)


def _kernels(sizes: Sizes):
    """(sample, verify_draft), compiled by shape."""
    config = Config(tile=128, lanes=128, stages=2, ways=2) if sizes.interpret else None
    how = {"config": config, "interpret": interpretation(sizes)}
    verify = jax.jit(partial(mosaic.verify_draft, **how), static_argnames=("rule", "max_logprobs"))
    return jax.jit(partial(mosaic.sample, **how)), verify


def _drafted(shape: Shape, sample) -> Drafted:
    count, width, vocab = shape
    of = lambda values, dtype: jnp.asarray(np.resize(values, count), dtype)
    rows = SamplingRows(
        temperature=of(_TEMPERATURE, jnp.float32),
        top_k=of(_TOP_K, jnp.int32),
        top_p=of(_TOP_P, jnp.float32),
        min_p=of(_MIN_P, jnp.float32),
        seed=jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (count, 2), np.uint32)),
        wants_logprobs=jnp.full(count, _LOGPROBS, jnp.int32),
    )
    positions = jnp.arange(count, dtype=jnp.int32)
    logits = 3 * random(7, *shape, dtype=jnp.float32)
    every, at = each(rows, positions, width)
    samples = np.asarray(sample(logits.reshape(-1, vocab), every, at)).reshape(count, width)
    return Drafted(logits, rows, positions, samples)


def verify_numbers(report: Report, sizes: Sizes) -> None:
    """Against the definition, by both rules. Its noise has other last bits on a GPU, so a sampled row in 64 may differ,
    where two tokens race that closely; a greedy one may not."""
    sample, ours = _kernels(sizes)
    definition = jax.jit(reference.verify_draft, static_argnames="rule")
    for shape in sizes.verified:
        given = _drafted(shape, sample)
        counts = jnp.full(shape.rows, shape.width - 1, jnp.int32)
        arguments = given.logits, given.drafts(wrong=True), counts, given.rows, given.positions
        proposed = given.logits[:, :-1] + random(8, shape.rows, shape.width - 1, shape.vocab, dtype=jnp.float32)
        ways = {"agreement": ("agreement", None), "rejection": ("rejection", proposed)}
        for name, (rule, draft_logits) in ways.items():
            options = {"rule": rule, "draft_logits": draft_logits}
            found, expected = ours(*arguments, **options), definition(*arguments, **options)
            differ = np.asarray((found.tokens != expected.tokens).any(axis=1))
            greedy = np.asarray(given.rows.temperature) == 0
            what = f"{name}, {shape.rows} rows, {shape.width - 1} drafts, {shape.vocab} tokens: rows that differ"
            fine = int(differ.sum()) <= -(-shape.rows // 64) and not differ[greedy].any()
            report.add(what, int(differ.sum()), ok=fine)


def verify_bits(report: Report, sizes: Sizes) -> None:
    """A position in a plain step, alone, and among drafts, which are all accepted: the same token, and the same bits
    of its log-probabilities."""
    sample, verify = _kernels(sizes)
    log = jax.jit(logprobs, static_argnums=2)
    for shape in sizes.verified:
        given = _drafted(shape, sample)
        counts = jnp.full(shape.rows, shape.width - 1, jnp.int32)
        arguments = given.logits, given.drafts(wrong=False), counts, given.rows, given.positions
        found = verify(*arguments, max_logprobs=_LOGPROBS)
        row = jax.tree.map(lambda leaf: leaf[-1:], given.rows)
        alone, wanted = [], []
        for step in range(shape.width):
            token = sample(given.logits[-1:, step], row, given.positions[-1:] + step)
            alone.append(int(token[0]))
            wanted.append(log(given.logits[-1:, step], token, _LOGPROBS, row.wants_logprobs).token_logprob[0])
        what = f"{shape.rows} rows, {shape.width - 1} drafts, {shape.vocab} tokens"
        verdicts = {
            "in a plain step and verified": (found.tokens == given.samples).all(),
            "in a plain step and alone": (given.samples[-1] == alone).all(),
            "log-probabilities verified and alone": (found.logprobs.token_logprob[-1] == jnp.stack(wanted)).all(),
        }
        for name, same in verdicts.items():
            report.add(f"{what}, {name}", "same bits" if same else "differ", ok=bool(same))


def verify_speed(report: Report, sizes: Sizes) -> None:
    """Microseconds of a call; the share is that of the floor, of bytes or of instructions."""
    _, verify = _kernels(sizes)
    for shape in sizes.verify_timed:
        for name, kind in KINDS.items():
            what = f"{name}, {shape.rows} rows, {shape.width - 1} drafts, {shape.vocab} tokens"
            if report.has_time(what):
                took = benchmark.measure(verify, benchmark.arguments(shape, kind), sizes.repeats)
                report.add(what, took, "us", share=max(floors(shape, kind)[1:]) / took)


CORRECTNESS = {"verification numbers": verify_numbers, "verification bits": verify_bits}
SPEED = {"verification speed": verify_speed}
