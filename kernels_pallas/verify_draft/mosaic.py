"""Sampling and verification for Hopper: one program a position, which streams its row of logits by bulk copies.

Passes    A row is read once for its maximum and once for the race, tile by tile through a ring of buffers; weights
          exist in registers only. Filters need neither sorting nor, as a rule, a threshold: the winner of a race is
          asked whether they keep it, in the same pass that holds the next race, among all that are nearer than it.
          Bytes read from the logits, in rows of 4 * vocab, up to whole tiles (a test counts the copies):
              greedy                           1
              sampled, no filter or min_p only 2
              top_k or top_p                   3, and 1 more for each winner that they do not keep (the likeliest token
                                               is kept unasked)
              top_k and top_p                  the same, and up to `narrowing_passes` to find the k-th distance
              rejection                        2 of p and 2 of q; of either up to `narrowing_passes` with top_k, and as
                                               many and 1 with top_p; 1 where the draft does not stand (and 1 of p
                                               if rounding leaves no p - q). A proposer without a choice has
                                               no q to read
          Log-probabilities are XLA's and come on top, for all rows (`logprobs`, without branches): a row is read for
          its maximum, the mass, the token's rank and the maxima of blocks of 32 tokens, 4 times 4 * vocab bytes where
          nothing is fused, and of the blocks with the largest maxima once more, 4 * 32 * max_logprobs bytes.
Order     Sums are sums of integers and a race has one winner, so neither tiles nor lanes have an order.
Bits      The arithmetic is that of `sampler.py`, operation by operation: interpreted, the tokens are the reference's.
          Compiled, exp and log are the GPU's and log1p is `passes.log1p`, so the noise has other last bits than on a
          CPU, and a token differs where two race that closely. A position's token is the same in every call of this
          kernel: alone, among other rows, in a plain step or in a verification.
Floor     A row of 128,256 logits is 513 kB, 0.11 us of an H200's 4.8 TB/s: 14 us for two passes of 64 rows. A race
          takes about 100 instructions a token (130 with filters; PTX, a division as ten), and one SM has the row: at
          128 a clock, 51 us. So instructions bound it, not bytes, and at batch 1 one SM works and 131 idle: the price
          of one launch without a barrier across the grid. `benchmark.py` prints both floors by shape.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from jaxserve.kernels_pallas.verify_draft import filters, noise, reference
from jaxserve.kernels_pallas.verify_draft.drafts import DraftLogits, DraftRows
from jaxserve.kernels_pallas.verify_draft.passes import NOBODY, Config, Passes, Program, Source
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows
from jaxserve.sampling_params import COLDEST
from jaxserve.validation import require

IDLE, GREEDY, SAMPLED, JUDGED = range(4)  # what there is to do at a position


def sample(
    logits: Float32[Array, "rows vocab"],
    rows: SamplingRows,
    positions: Int32[Array, " rows"],
    *,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Int32[Array, " rows"]:
    """`sampler.sample`."""
    with jax.named_scope("sample"):
        kinds = jnp.where(rows.temperature >= COLDEST, jnp.int32(SAMPLED), jnp.int32(GREEDY))
        keys = noise.row_keys(rows.seed, positions)
        return run(logits, kinds, rows, keys, config=config, interpret=interpret)


def verify_draft(
    logits: Float32[Array, "rows vocab"],
    rows: SamplingRows,
    positions: Int32[Array, " rows"],
    drafts: DraftRows,
    *,
    rule: str = "agreement",
    draft_logits: DraftLogits | None = None,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Int32[Array, " rows"]:
    """`reference.verify_draft`; rows behind a wrong draft are computed, too."""
    reference.check_rule(rule)
    behind = drafts.next()
    judged = behind.exists if rule == "rejection" else jnp.zeros_like(behind.exists)
    kinds = jnp.where(rows.temperature >= COLDEST, jnp.where(judged, JUDGED, SAMPLED), GREEDY)
    kinds = jnp.where(drafts.real, kinds, IDLE).astype(jnp.int32)
    keys = noise.row_keys(rows.seed, positions)
    judgement = None
    if rule == "rejection":
        keys = jnp.where(judged[:, None], noise.row_keys(rows.seed, positions, noise.RESIDUAL), keys)
        chance = noise.uniform(noise.row_keys(rows.seed, positions, noise.ACCEPTANCE)[:, 0])
        judgement = Judgement(chance, jnp.clip(behind.token, 0, logits.shape[1] - 1), draft_logits)
    with jax.named_scope("verify_draft"):
        tokens = run(logits, kinds, rows, keys, judgement, config=config, interpret=interpret)
        return jnp.where(drafts.real, tokens, 0)  # the kernel leaves out what does not exist


class Judgement(NamedTuple):
    """What rejection needs besides, per position: of the draft that stands behind it."""

    chance: Float32[Array, " positions"]
    drafts: Int32[Array, " positions"]
    draft_logits: DraftLogits | None


def run(
    logits: Float32[Array, "positions vocab"],
    kinds: Int32[Array, " positions"],
    rows: SamplingRows,
    keys: UInt32[Array, "positions 2"],
    judgement: Judgement | None = None,
    *,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Int32[Array, " positions"]:
    """The kernel: each position's token (a draft where it stands). Junk where `kinds` is IDLE."""
    positions, vocab = logits.shape
    require(logits.size < 2**31, "logits", logits.shape, "fewer than 2^31 values")
    config = config or Config(lanes=1024 if judgement is None else 512)
    filtering = filters.FilterRows.of(rows.top_k, rows.top_p, rows.min_p, vocab)
    bits = lambda values: lax.bitcast_convert_type(values, jnp.int32)
    none = jnp.zeros_like(kinds)
    chance, drafts, draft_logits = (none.astype(jnp.float32), none, None) if judgement is None else judgement
    temperature = jnp.where(kinds >= SAMPLED, rows.temperature, jnp.float32(1))
    target, config = flatten(logits, config)
    sources, offered_row = [target], none
    if draft_logits is not None:
        require(draft_logits.logits.size < 2**31, "draft_logits", draft_logits.logits.shape, "fewer than 2^31 values")
        sources.append(flatten(draft_logits.logits, config)[0])
        offered_row = draft_logits.next_row()
    integers = kinds, filtering.top_k, bits(jnp.abs(filtering.furthest)), *bits(keys).T, drafts, offered_row
    floats = jnp.stack([filtering.top_p, temperature, chance], axis=1)
    passes = Passes(vocab, target.shape[0] // positions, config, interpret is not None)
    ring = lambda: (plgpu.SMEM((config.stages, config.tile), jnp.float32), plgpu.Barrier(num_barriers=config.stages))

    def verify_draft(*refs) -> None:
        _program(passes, len(sources), judgement is not None, *refs)

    return plgpu.kernel(
        verify_draft,
        out_type=jax.ShapeDtypeStruct((positions,), jnp.int32),
        grid=(positions,),
        grid_names=("position",),
        scratch_types=[memory for _ in sources for memory in ring()],
        interpret=interpret,
    )(*sources, jnp.stack(integers, axis=1), floats)


def flatten(logits: Float32[Array, "positions vocab"], config: Config) -> tuple[Float32[Array, " values"], Config]:
    """The rows as bulk copies can read them, 16 bytes and a tile at least, and a config that fits them.

    A vocabulary that is no multiple of 4, or smaller than a vector, is copied once with -inf behind its rows."""
    vocab = logits.shape[1]
    width = max(-(-vocab // 4) * 4, config.lanes)
    if width > vocab:
        logits = jnp.pad(logits, ((0, 0), (0, width - vocab)), constant_values=-jnp.inf)
    tile = min(config.tile, width // config.lanes * config.lanes)
    return logits.reshape(-1), dataclasses.replace(config, tile=tile)


def _program(passes: Passes, num_sources: int, judges: bool, *refs) -> None:
    """One position."""
    sources, memory = refs[:num_sources], refs[num_sources + 3 :]
    integers, floats, tokens = refs[num_sources : num_sources + 3]
    position = lax.axis_index("position")
    kind, top_k, furthest, first_key, second_key, draft, offered_row = (integers[position, i] for i in range(7))
    top_p, temperature, chance = (floats[position, i] for i in range(3))
    keys = first_key.astype(jnp.uint32), second_key.astype(jnp.uint32)
    program = Program(top_k, top_p, furthest, temperature, *keys, draft, chance)
    target = Source(sources[0], *memory[:2], position * passes.width)
    drafted = Source(sources[1], *memory[2:], offered_row * passes.width) if num_sources == 2 else None

    @pl.when(kind != IDLE)
    def _():
        likeliest, maximum = passes.largest(target)

        draw = lambda: passes.draw(target, maximum, program)
        judge = lambda: passes.judge(target, drafted, maximum, program)
        drawn = draw if not judges else lambda: lax.cond(kind == JUDGED, judge, draw)
        token = lax.cond(kind >= SAMPLED, drawn, lambda: likeliest)
        tokens[position] = jnp.where(token == NOBODY, likeliest, token)  # of logits that are not finite
