"""min_p, top_k and top_p as one limit per row on a token's distance from the row's best.

The distance is (largest logit - logit) / temperature, so a token's weight is exp(-distance), and every filter
keeps the tokens whose distance is at most some limit: tokens that tie with the last one kept are kept too.
Sums of weights are made of integers. Whatever the order, the number of rows or the way the vocabulary is
cut up, they come out the same, and so do the decisions of top_p.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

INFINITY_BITS = 0x7F800000


class FilterRows(NamedTuple):
    """The filters of each row, normalised: what is off is `vocab`, 1 and infinity."""

    top_k: Int32[Array, " rows"]
    top_p: Float32[Array, " rows"]
    furthest: Float32[Array, " rows"]  # min_p as a distance

    @classmethod
    def of(
        cls,
        top_k: Int32[Array, " rows"],
        top_p: Float32[Array, " rows"],
        min_p: Float32[Array, " rows"],
        vocab: int,
    ) -> "FilterRows":
        k = jnp.where((top_k <= 0) | (top_k >= vocab), jnp.int32(vocab), top_k)
        return cls(k, top_p, -jnp.log(min_p))

    def active(self, vocab: int) -> Bool[Array, " rows"]:
        """Whether a row filters at all."""
        return (self.top_k < vocab) | (self.top_p < 1) | (self.furthest < jnp.inf)


class Mass(NamedTuple):
    """An exact sum of weights, `high * 2**limb + low`, with low < 2**limb."""

    high: UInt32[Array, "*n"]
    low: UInt32[Array, "*n"]


def limb_bits(vocab: int) -> int:
    """The bits of a limb: `vocab` of them sum up in 32 bits. A weight has two (2^-30 of the row's largest is
    the unit up to a vocabulary of 131,072, and 2^-28 up to twice that)."""
    return min(15, 32 - math.ceil(math.log2(vocab))) if vocab > 1 else 15


def weights(distances: Float32[Array, "*n"], limb: int) -> UInt32[Array, "*n"]:
    """exp(-distance) in units of 2**(-2 limb), below 2**(2 limb)."""
    scale = 2.0 ** (2 * limb) - 2.0 ** (2 * limb - 24)
    scaled = jnp.exp(-distances) * jnp.float32(scale) + jnp.float32(0.5)
    return scaled.astype(jnp.int32).astype(jnp.uint32)


def mass(weight: UInt32[Array, "..."], counted: Bool[Array, "..."], limb: int) -> Mass:
    """The sum of the counted weights over the last axis; the two broadcast."""
    shift, mask, zero = jnp.uint32(limb), jnp.uint32(2**limb - 1), jnp.uint32(0)
    high = jnp.where(counted, weight >> shift, zero).sum(axis=-1, dtype=jnp.uint32)
    low = jnp.where(counted, weight & mask, zero).sum(axis=-1, dtype=jnp.uint32)
    return Mass(high + (low >> shift), low & mask)


def total(parts: Mass, limb: int) -> Mass:
    """The sum of masses over the last axis."""
    high, low = parts.high.sum(axis=-1, dtype=jnp.uint32), parts.low.sum(axis=-1, dtype=jnp.uint32)
    return Mass(high + (low >> jnp.uint32(limb)), low & jnp.uint32(2**limb - 1))


def to_float(total: Mass, limb: int) -> Float32[Array, "*n"]:
    """The mass relative to the weight at distance 0."""
    high = total.high.astype(jnp.float32) * jnp.float32(2.0**-limb)
    return high + total.low.astype(jnp.float32) * jnp.float32(2.0 ** (-2 * limb))


def below(left: Mass, right: Mass) -> Bool[Array, "..."]:
    return (left.high < right.high) | ((left.high == right.high) & (left.low < right.low))


def share(total: Mass, top_p: Float32[Array, "*n"], limb: int) -> Mass:
    """top_p of the total, at least 1 unit."""
    units = to_float(total, limb) * top_p * jnp.float32(2.0**limb)
    high = units.astype(jnp.uint32)
    low = ((units - high.astype(jnp.float32)) * jnp.float32(2.0**limb)).astype(jnp.uint32)
    return Mass(high, jnp.where(high == 0, jnp.maximum(low, jnp.uint32(1)), low))


def bisect(holds: Callable[[Float32[Array, " rows"]], Bool[Array, " rows"]], rows: int) -> Float32[Array, " rows"]:
    """The largest distance for which the monotone predicate holds (it holds at 0), to the last bit.

    Distances are not negative, so they are ordered as the integers with the same bits: 31 halvings."""

    def step(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        true = holds(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(true, middle, low), jnp.where(true, high, middle - 1)

    start = jnp.zeros(rows, jnp.int32), jnp.full(rows, INFINITY_BITS, jnp.int32)
    return lax.bitcast_convert_type(lax.fori_loop(0, 31, step, start)[0], jnp.float32)


class Nucleus(NamedTuple):
    """The filters on whole rows, ready to be asked about single tokens."""

    limit: Float32[Array, " rows"]  # of min_p and top_k
    weight: UInt32[Array, "rows vocab"]
    target: Mass  # top_p of the weights within the limit
    everything: Bool[Array, " rows"]  # top_p is off

    @classmethod
    def of(cls, distances: Float32[Array, "rows vocab"], filters: FilterRows) -> "Nucleus":
        rows, vocab = distances.shape
        limb = limb_bits(vocab)

        def kth() -> Array:
            def fewer(at):
                return (distances < at[:, None]).sum(axis=1, dtype=jnp.int32) < filters.top_k

            return bisect(fewer, rows)

        far = jnp.full(rows, jnp.inf, jnp.float32)
        limit = jnp.minimum(filters.furthest, lax.cond(jnp.any(filters.top_k < vocab), kth, lambda: far))
        weight = weights(distances, limb)
        total = mass(weight, distances <= limit[:, None], limb)
        return cls(limit, weight, share(total, filters.top_p, limb), filters.top_p >= 1)

    def keeps(self, distances: Float32[Array, "rows vocab"], at: Float32[Array, " rows"]) -> Bool[Array, " rows"]:
        """Whether each row keeps the tokens at a distance: those nearer have less than the target."""
        nearer = mass(self.weight, distances < at[:, None], limb_bits(distances.shape[1]))
        return (at <= self.limit) & (self.everything | below(nearer, self.target))


class CandidateLimits(NamedTuple):
    """Which candidates the filters keep, and the rows for which that is all they keep."""

    kept: Bool[Array, "rows k"]
    suffices: Bool[Array, " rows"]


def candidate_limits(
    candidates: Float32[Array, "rows k"],
    filters: FilterRows,
    vocab: int,
    whole_mass: Callable[[], Mass],
) -> CandidateLimits:
    """The filters on the distances of each row's best tokens, in ascending order.

    A row's candidates suffice if the last of them is dropped; `whole_mass` gives the mass that min_p leaves
    of the whole rows, and is called where top_p needs more than the candidates.
    """
    limb, width = limb_bits(vocab), candidates.shape[1]
    complete = jnp.bool_(width >= vocab) | (candidates[:, -1] == jnp.inf)  # masked tokens are none
    place = jnp.clip(filters.top_k, 1, width) - 1
    kth = jnp.take_along_axis(candidates, place[:, None], axis=1, mode="promise_in_bounds")[:, 0]
    limit = jnp.minimum(filters.furthest, jnp.where(filters.top_k < width, kth, jnp.float32(jnp.inf)))
    last = candidates[:, -1]
    inside = (limit < last) | complete

    # What is nearer than each candidate, and in the last column what is within the limit.
    ends = jnp.concatenate([candidates, jnp.nextafter(limit, jnp.float32(jnp.inf))[:, None]], axis=1)
    sums = mass(weights(candidates, limb)[:, None, :], candidates[:, None, :] < ends[:, :, None], limb)
    near_mass = Mass(sums.high[:, -1], sums.low[:, -1])
    needs_whole = ~inside & (filters.top_k >= vocab) & (filters.top_p < 1)
    whole = lax.cond(jnp.any(needs_whole), whole_mass, lambda: near_mass)
    left = Mass(*(jnp.where(inside, near, all_) for near, all_ in zip(near_mass, whole, strict=True)))
    target = share(Mass(left.high[:, None], left.low[:, None]), filters.top_p[:, None], limb)
    in_nucleus = below(Mass(sums.high[:, :-1], sums.low[:, :-1]), target) | (filters.top_p >= 1)[:, None]
    kept = (candidates <= limit[:, None]) & in_nucleus & (candidates < jnp.inf)
    return CandidateLimits(kept, complete | (~kept[:, -1] & (inside | (filters.top_k >= vocab))))
