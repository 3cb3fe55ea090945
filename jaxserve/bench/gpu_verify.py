"""Sections of `gpu_check` about sampling and the verification of drafts."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.gpu_kernels import interpretation, random
from jaxserve.bench.gpu_sizes import Sizes
from jaxserve.bench.report import Report
from jaxserve.kernels_pallas.verify_draft import DraftLogits, DraftRows, benchmark, mosaic, reached, reference
from jaxserve.kernels_pallas.verify_draft.benchmark import KINDS, Shape, floors
from jaxserve.kernels_pallas.verify_draft.logprobs import logprobs
from jaxserve.kernels_pallas.verify_draft.passes import Config
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows

_LOGPROBS = 4
# Of the rows in turn; the first are greedy.
_TEMPERATURE = (0.0, 1.0, 0.7, 1.0, 1.5, 1.0)
_TOP_K = (0, 0, 0, 5, 40, 0)
_TOP_P = (1.0, 1.0, 0.9, 1.0, 0.9, 1.0)
_MIN_P = (0.0, 0.0, 0.0, 0.0, 0.0, 0.1)


class Drafted(NamedTuple):
    """Runs of rows of logits, behind each other, and the tokens that the kernel samples after each in a plain step."""

    shape: Shape
    logits: jax.Array  # [rows * width, vocab]
    rows: SamplingRows
    positions: jax.Array
    samples: np.ndarray

    def drafts(self, *, wrong: bool) -> DraftRows:
        """What was sampled, with the draft that follows ever more of them off by one if `wrong`."""
        count, width, vocab = self.shape
        off = np.arange(width) == (np.arange(count) % width)[:, None]
        sampled = self.samples.reshape(count, width)
        token = np.roll(np.where(off & wrong, (sampled + 1) % vocab, sampled), 1, axis=1).astype(np.int32)
        number = np.tile(np.arange(width, dtype=np.int32), count)
        return DraftRows(*map(jnp.asarray, (number, token.reshape(-1), np.ones(count * width, bool))))


def _kernels(sizes: Sizes):
    """(sample, verify_draft), compiled by shape."""
    config = Config(tile=128, lanes=128, stages=2, ways=2) if sizes.interpret else None
    how = {"config": config, "interpret": interpretation(sizes)}
    verify = jax.jit(partial(mosaic.verify_draft, **how), static_argnames="rule")
    return jax.jit(partial(mosaic.sample, **how)), verify


def _drafted(shape: Shape, sample) -> Drafted:
    count, width, vocab = shape
    of = lambda values, dtype: jnp.asarray(np.resize(values, count).repeat(width), dtype)
    rows = SamplingRows(
        temperature=of(_TEMPERATURE, jnp.float32),
        top_k=of(_TOP_K, jnp.int32),
        top_p=of(_TOP_P, jnp.float32),
        min_p=of(_MIN_P, jnp.float32),
        seed=jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (count, 2), np.uint32).repeat(width, axis=0)),
        wants_logprobs=jnp.full(count * width, _LOGPROBS, jnp.int32),
    )
    positions = (jnp.arange(count, dtype=jnp.int32)[:, None] + jnp.arange(width, dtype=jnp.int32)).reshape(-1)
    logits = 3 * random(7, count * width, vocab, dtype=jnp.float32)
    return Drafted(shape, logits, rows, positions, np.asarray(sample(logits, rows, positions)))


def _yielded(tokens: jax.Array, drafts: DraftRows, shape: Shape) -> np.ndarray:
    """The tokens of each run up to the first that is no draft, then -1."""
    counts = reached(drafts, tokens, jnp.ones_like(drafts.real))
    return np.asarray(jnp.where(counts, tokens, -1)).reshape(shape.rows, shape.width)


def verify_numbers(report: Report, sizes: Sizes) -> None:
    """Against the definition, by both rules. Its noise has other last bits on a GPU, so a sampled row in 64 may differ,
    where two tokens race that closely; a greedy one may not."""
    sample, ours = _kernels(sizes)
    definition = jax.jit(reference.verify_draft, static_argnames="rule")
    for shape in sizes.verified:
        given = _drafted(shape, sample)
        drafts = given.drafts(wrong=True)
        arguments = given.logits, given.rows, given.positions, drafts
        near = given.logits + random(8, *given.logits.shape, dtype=jnp.float32)
        proposed = DraftLogits(near, jnp.arange(len(near), dtype=jnp.int32) - 1)
        ways = {"agreement": ("agreement", None), "rejection": ("rejection", proposed)}
        for name, (rule, draft_logits) in ways.items():
            options = {"rule": rule, "draft_logits": draft_logits}
            tokens = ours(*arguments, **options), definition(*arguments, **options)
            found, expected = (_yielded(some, drafts, shape) for some in tokens)
            differ = (found != expected).any(axis=1)
            greedy = np.asarray(given.rows.temperature)[:: shape.width] == 0
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
        drafts = given.drafts(wrong=False)
        found = verify(given.logits, given.rows, given.positions, drafts)
        chosen = log(given.logits, found, _LOGPROBS, given.rows.wants_logprobs).token_logprob
        row = jax.tree.map(lambda leaf: leaf[-1:], given.rows)
        alone, wanted = [], []
        for at in range(len(given.logits) - shape.width, len(given.logits)):
            token = sample(given.logits[at : at + 1], row, given.positions[at : at + 1])
            alone.append(int(token[0]))
            wanted.append(log(given.logits[at : at + 1], token, _LOGPROBS, row.wants_logprobs).token_logprob[0])
        what = f"{shape.rows} rows, {shape.width - 1} drafts, {shape.vocab} tokens"
        verdicts = {
            "in a plain step and verified": (_yielded(found, drafts, shape) == given.samples.reshape(shape[:2])).all(),
            "in a plain step and alone": (given.samples[-shape.width :] == alone).all(),
            "log-probabilities verified and alone": (chosen[-shape.width :] == jnp.stack(wanted)).all(),
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
