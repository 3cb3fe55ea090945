"""Sampling rows of logits by a Gumbel race: pure functions for use inside a jitted program.

The token is the argmin of `distance + negative_gumbel(seed, position, id)` over the tokens that the filters
keep, which draws from exactly their distribution. There are no sums over the vocabulary in the choice, a
draft model that races with the same noise agrees often, and the vocabulary may be split over devices.

A row's token depends on its own logits, parameters, seed and position, bit for bit, not on the other rows.
Work that no row needs is not done, and one compiled program serves every mix of rows:
- greedy rows: one maximum over the logits;
- filtered rows: the best `candidates` tokens, if the filters keep no more than those;
- the rest: noise for the whole vocabulary, again and again until the winner is one that the filters keep.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxserve.kernels_pallas.verify_draft import blocks, filters
from jaxserve.kernels_pallas.verify_draft.noise import negative_gumbel, row_keys
from jaxserve.sampling_params import COLDEST


class SamplingRows(NamedTuple):
    """The sampling parameters of each row, as in SamplingParams."""

    temperature: Float32[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float32[Array, " rows"]
    min_p: Float32[Array, " rows"]
    seed: UInt32[Array, "rows 2"]  # sampling_params.seed_words
    wants_logprobs: Int32[Array, " rows"]  # the number of most likely tokens; -1 for no logprobs


class Row(NamedTuple):
    """What turns logits into distances and noise."""

    maximum: Float32[Array, " rows"]
    temperature: Float32[Array, " rows"]
    keys: UInt32[Array, "rows 2"]

    def distances(self, logits: Float32[Array, "rows *n"]) -> Float32[Array, "rows *n"]:
        shape = (-1,) + (1,) * (logits.ndim - 1)
        return (self.maximum.reshape(shape) - logits) / self.temperature.reshape(shape)


def sample(
    logits: Float32[Array, "rows vocab"],
    rows: SamplingRows,
    positions: Int32[Array, " rows"],
    *,
    candidates: int = 64,
) -> Int32[Array, " rows"]:
    """One token for each row; `positions` are those of the sampled tokens.

    `candidates` is the largest number of kept tokens for which the cheap way suffices; 0 leaves it out (on a
    GPU a top-k this wide sorts the vocabulary). It changes the cost, not the tokens.
    """
    vocab = logits.shape[1]
    with jax.named_scope("sample"):
        greedy, maximum = blocks.largest(logits)
        samples = rows.temperature >= COLDEST
        temperature = jnp.where(samples, rows.temperature, jnp.float32(1))
        filtering = filters.FilterRows.of(rows.top_k, rows.top_p, rows.min_p, vocab)
        filtered = samples & filtering.active(vocab)

        def draw() -> Array:
            row = Row(maximum, temperature, row_keys(rows.seed, positions))
            none = jnp.zeros_like(samples)
            near, sufficed = greedy, none
            if candidates:
                near, sufficed = lax.cond(
                    jnp.any(filtered),
                    lambda: _draw_from_candidates(logits, row, filtering, candidates),
                    lambda: (greedy, none),
                )
            tokens = jnp.where(filtered, near, greedy)
            wide = filtered & ~sufficed
            search = _search_one_by_one if candidates else _search_together
            tokens = lax.cond(jnp.any(wide), lambda: search(logits, row, filtering, wide, tokens), lambda: tokens)
            plain = samples & ~filtered
            far = jnp.full_like(maximum, jnp.inf)
            return lax.cond(jnp.any(plain), lambda: jnp.where(plain, _race(logits, row, far), tokens), lambda: tokens)

        return lax.cond(jnp.any(samples), draw, lambda: greedy)


class NearTokens(NamedTuple):
    """The best tokens of each row in ascending order of distance, which of them the filters keep, and for which rows
    these are all that they keep."""

    ids: Int32[Array, "rows k"]
    distances: Float32[Array, "rows k"]
    kept: Bool[Array, "rows k"]
    suffices: Bool[Array, " rows"]


def near_tokens(
    logits: Float32[Array, "rows vocab"], row: Row, filtering: filters.FilterRows, candidates: int
) -> NearTokens:
    """The filters on the best `candidates` tokens of each row."""
    vocab = logits.shape[1]

    def whole_mass() -> filters.Mass:
        limb = filters.limb_bits(vocab)
        # Block by block: in one sum over the row XLA's code is half as fast.
        distances = row.distances(blocks.to_blocks(logits))
        kept = distances <= filtering.furthest[:, None, None]
        return filters.total(filters.mass(filters.weights(distances, limb), kept, limb), limb)

    top = blocks.top_logits(logits, min(candidates + 1, vocab))
    distances = row.distances(top.logits)
    return NearTokens(top.ids, distances, *filters.candidate_limits(distances, filtering, vocab, whole_mass))


def _draw_from_candidates(
    logits: Float32[Array, "rows vocab"], row: Row, filtering: filters.FilterRows, candidates: int
) -> tuple[Int32[Array, " rows"], Bool[Array, " rows"]]:
    """The sampled tokens, and whether the candidates sufficed."""
    near = near_tokens(logits, row, filtering, candidates)
    race = jnp.where(near.kept, near.distances + negative_gumbel(row.keys, near.ids), jnp.float32(jnp.inf))
    winners = race == race.min(axis=1, keepdims=True)
    return jnp.where(winners, near.ids, jnp.int32(logits.shape[1])).min(axis=1), near.suffices


def _race(logits: Float32[Array, "rows vocab"], row: Row, limit: Float32[Array, " rows"]) -> Int32[Array, " rows"]:
    """The winner among all tokens up to the limit."""

    def entries(values: Array, ids: Array) -> Array:
        distances = row.distances(values)
        kept = distances <= limit[:, None, None]
        return jnp.where(kept, distances + negative_gumbel(row.keys, ids), jnp.float32(jnp.inf))

    blocked = blocks.to_blocks(logits)
    every = lax.iota(jnp.int32, blocked.shape[1])[None]
    block = lax.argmin(entries(blocked, blocks.block_ids(every)).min(axis=2), 1, jnp.int32)[:, None]
    inside = entries(blocks.take_blocks(blocked, block), blocks.block_ids(block))[:, 0]
    return block[:, 0] * jnp.int32(blocks.BLOCK) + lax.argmin(inside, 1, jnp.int32)


class Search(NamedTuple):
    """A race that is run again, among fewer tokens, until its winner is one that the filters keep."""

    tokens: Int32[Array, " rows"]
    limit: Float32[Array, " rows"]
    found: Bool[Array, " rows"]


def _search_together(
    logits: Float32[Array, "rows vocab"],
    row: Row,
    filtering: filters.FilterRows,
    wide: Bool[Array, " rows"],
    tokens: Int32[Array, " rows"],
) -> Int32[Array, " rows"]:
    """`tokens` with those of the wide rows drawn by a race over the vocabulary.

    The winner of the race among the kept tokens is the first that is kept in the order of the race among all. So
    there is no threshold to search for: a winner is asked whether it is kept, which top_p of the winners are, and
    one that is not leaves out all that are as far away.
    """
    distances = row.distances(logits)
    nucleus = filters.Nucleus.of(distances, filtering)

    def race(state: Search) -> Search:
        winners = _race(logits, row, state.limit)
        at = jnp.take_along_axis(distances, winners[:, None], axis=1, mode="promise_in_bounds")[:, 0]
        kept = nucleus.keeps(distances, at) | ~(at > 0) | (at == jnp.inf)  # NaN, too, must end
        return Search(
            jnp.where(state.found, state.tokens, winners),
            jnp.where(kept, state.limit, jnp.nextafter(at, jnp.float32(0))),
            state.found | kept,
        )

    return lax.while_loop(lambda state: ~state.found.all(), race, Search(tokens, nucleus.limit, ~wide)).tokens


def _search_one_by_one(
    logits: Float32[Array, "rows vocab"],
    row: Row,
    filtering: filters.FilterRows,
    wide: Bool[Array, " rows"],
    tokens: Int32[Array, " rows"],
) -> Int32[Array, " rows"]:
    """The same, at a cost in proportion to the number of wide rows."""

    def step(index: Array, tokens: Array) -> Array:
        def one() -> Array:
            parts = logits, row, filtering, wide, tokens
            parts = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index, 1), parts)
            return lax.dynamic_update_slice(tokens, _search_together(*parts), (index,))

        return lax.cond(wide[index], one, lambda: tokens)

    return lax.fori_loop(0, wide.shape[0], step, tokens)
