"""What the Hopper kernel does to one row of logits: passes over it, each a fold over tiles (see `mosaic.py`)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxserve.kernels_pallas.verify_draft import filters, noise
from jaxserve.kernels_pallas.verify_draft.filters import INFINITY_BITS, Mass

NOBODY = 2**31 - 1  # a token id above all others
FAR = float("inf")


@dataclasses.dataclass(frozen=True)
class Config:
    """Values of a tile and of the vectors it is worked on in; buffers in the ring; parts an interval is cut into."""

    tile: int = 4096
    lanes: int = 1024
    stages: int = 4
    ways: int = 8

    def __post_init__(self):
        if self.lanes % 128 or self.tile % self.lanes:
            raise ValueError(f"tile={self.tile} must be a multiple of lanes={self.lanes}, and that of 128")

    @property
    def narrowing_passes(self) -> int:
        """Passes that find one of 2^31 distances, at most."""
        return -(-31 // (self.ways.bit_length() - 1))


class Source(NamedTuple):
    """One row of logits, as the kernel reaches it."""

    logits: Any  # [all rows * width], in global memory
    ring: Any  # [stages, tile]
    ready: Any  # a barrier for each buffer
    start: Array  # where the row begins


class Program(NamedTuple):
    """The scalars of one position. A distance is (maximum - logit) / temperature; it is ordered as its bits are."""

    top_k: Array
    top_p: Array
    furthest: Array  # bits of min_p's distance
    temperature: Array
    first_key: Array
    second_key: Array
    draft: Array
    chance: Array


class Raced(NamedTuple):
    """The winner of a race, the bits of its distance, and how many tokens took part, with what mass."""

    token: Array
    at: Array
    count: Array
    mass: Mass


class Distribution(NamedTuple):
    """The tokens up to `limit`, and the sum of their weights."""

    maximum: Array
    limit: Array
    total: Array

    def probabilities(self, values: Array, program: Program) -> Array:
        away, bits = distances(self.maximum, values, program)
        return jnp.where(bits <= self.limit, jnp.exp(-away), jnp.float32(0)) / self.total


class Passes(NamedTuple):
    """`vocab` is without padding, `width` that of a row in memory."""

    vocab: int
    width: int
    config: Config
    interpreted: bool

    @property
    def limb(self) -> int:
        return filters.limb_bits(self.vocab)

    def filled(self, value: int | float, dtype: Any) -> Array:
        return jnp.full((self.config.lanes,), value, dtype)

    def sweep(self, step: Callable, carry: Any, *sources: Source) -> Any:
        """Fold `carry = step(carry, ids, fresh, *values)` over rows, `lanes` tokens at a time.

        The last tile ends with the row; what it shares with the one before is not `fresh`."""
        tile, lanes, stages, _ = dataclasses.astuple(self.config)
        tiles = -(-self.width // tile)
        iota = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=plgpu.Layout.WG_STRIDED((lanes,), lanes // 128))

        def first(index):
            return jnp.minimum(index * tile, self.width - tile)

        def load(index, slot):
            for source in sources:
                part = source.logits.at[pl.ds(source.start + first(index), tile)]
                # In bounds: one plain bulk copy of any length, where a tensor map stops at 256 values.
                in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                plgpu.copy_gmem_to_smem(part, source.ring.at[slot], source.ready.at[slot], oob_mode=in_bounds)

        def fold(index, carry):
            slot = lax.rem(index, jnp.int32(stages))
            for source in sources:
                plgpu.barrier_wait(source.ready.at[slot])

            def part(number, carry):
                at = number * lanes
                ids = iota + (first(index) + at)
                return step(carry, ids, ids >= index * tile, *(s.ring[slot, pl.ds(at, lanes)] for s in sources))

            carry = lax.fori_loop(jnp.int32(0), jnp.int32(tile // lanes), part, carry)
            plgpu.commit_smem()
            pl.when(index + stages < tiles)(lambda: load(index + stages, slot))
            return carry

        for i in range(min(stages, tiles)):
            load(jnp.int32(i), i)
        return lax.fori_loop(jnp.int32(0), jnp.int32(tiles), fold, carry)

    def noise(self, program: Program, ids: Array) -> Array:
        """`noise.negative_gumbel`."""
        uniform = noise.uniform(noise.token_bits(program.first_key, program.second_key, ids))
        return jnp.log(-(jnp.log1p if self.interpreted else log1p)(-uniform))

    def largest(self, source: Source) -> tuple[Array, Array]:
        """The lowest id of the largest logit, and that logit."""

        def step(carry, ids, fresh, values):
            best, token = carry
            better = values > best
            return jnp.where(better, values, best), jnp.where(better, ids, token)

        best, token = self.sweep(step, (self.filled(-FAR, jnp.float32), self.filled(NOBODY, jnp.int32)), source)
        maximum = jnp.max(best)
        token = jnp.min(jnp.where(best == maximum, token, NOBODY))
        return jnp.where(token == NOBODY, 0, token), maximum

    def quickest(self, value_of: Callable, *sources: Source) -> Array:
        """The id with the least `value_of(ids, *values)`, the lowest among equals; NOBODY if all are inf."""

        def step(carry, ids, fresh, *values):
            best, token = carry
            value = value_of(ids, *values)
            better = value < best
            return jnp.where(better, value, best), jnp.where(better, ids, token)

        start = self.filled(FAR, jnp.float32), self.filled(NOBODY, jnp.int32)
        best, token = self.sweep(step, start, *sources)
        return jnp.min(jnp.where(best == jnp.min(best), token, NOBODY))

    def race(self, source: Source, maximum: Array, program: Program, limit: Array, below: Array) -> Raced:
        """The race among the tokens whose distance has bits up to `limit` and less than `below`."""

        def step(carry, ids, fresh, values):
            best, token, at, count, sums = carry
            away, bits = distances(maximum, values, program)
            inside = (bits <= limit) & (bits < below)
            value = jnp.where(inside, away + self.noise(program, ids), FAR)
            better = value < best
            winner = jnp.where(better, value, best), jnp.where(better, ids, token), jnp.where(better, bits, at)
            counted = inside & fresh
            return *winner, count + counted.astype(jnp.int32), self.add_mass(sums, away, counted)

        winner = self.filled(FAR, jnp.float32), self.filled(NOBODY, jnp.int32), self.filled(NOBODY, jnp.int32)
        start = *winner, self.filled(0, jnp.int32), self.no_mass()
        best, token, at, count, sums = self.sweep(step, start, source)
        won = jnp.min(jnp.where(best == jnp.min(best), token, NOBODY))
        distance = jnp.min(jnp.where(token == won, at, NOBODY))
        return Raced(won, distance, total(count), filters.total(Mass(*sums), self.limb))

    def no_mass(self) -> tuple[Array, Array]:
        return self.filled(0, jnp.uint32), self.filled(0, jnp.uint32)

    def add_mass(self, sums: tuple[Array, Array], away: Array, counted: Array) -> tuple[Array, Array]:
        weight, zero = filters.weights(away, self.limb), jnp.uint32(0)
        high = jnp.where(counted, weight >> jnp.uint32(self.limb), zero)
        low = jnp.where(counted, weight & jnp.uint32(2**self.limb - 1), zero)
        return sums[0] + high, sums[1] + low

    def mass(self, source: Source, maximum: Array, program: Program, limit: Array) -> tuple[Mass, Array]:
        """Of the tokens up to `limit`, and the weight of the draft, if it is one of them."""

        def step(carry, ids, fresh, values):
            sums, draft = carry
            away, bits = distances(maximum, values, program)
            counted = fresh & (bits <= limit)
            chosen = jnp.where(counted & (ids == program.draft), jnp.exp(-away), jnp.float32(0))
            return self.add_mass(sums, away, counted), draft + chosen

        sums, draft = self.sweep(step, (self.no_mass(), self.filled(0, jnp.float32)), source)
        return filters.total(Mass(*sums), self.limb), jnp.max(draft)

    def narrow(self, holding: Callable[[list[Array]], Array]) -> Array:
        """The bits of the largest distance for which a monotone predicate holds (it holds at 0); `holding` says for
        how many of some ascending ones it does."""
        ways = self.config.ways

        def closer(bounds):
            low, high = bounds  # it holds at low, not at high
            stride = lax.div(high - low + (ways - 1), jnp.int32(ways))
            holds = holding([low + stride * i for i in range(1, ways)])
            return low + stride * holds, jnp.minimum(high, low + stride * (holds + 1))

        start = jnp.int32(0), jnp.int32(INFINITY_BITS + 1)
        return lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, closer, start)[0]

    def kth(self, source: Source, maximum: Array, program: Program) -> Array:
        """The bits of the distance of the top_k-th token."""

        def holding(thresholds):
            def step(counts, ids, fresh, values):
                bits = distances(maximum, values, program)[1]
                return [n + (fresh & (bits < t)).astype(jnp.int32) for n, t in zip(counts, thresholds, strict=True)]

            counts = self.sweep(step, [self.filled(0, jnp.int32) for _ in thresholds], source)
            return number_of(total(count) < program.top_k for count in counts)

        return self.narrow(holding)

    def nucleus(self, source: Source, maximum: Array, program: Program, limit: Array) -> Array:
        """The bits of the furthest distance that top_p keeps of the tokens up to `limit`."""
        target = filters.share(self.mass(source, maximum, program, limit)[0], program.top_p, self.limb)

        def holding(thresholds):
            def step(sums, ids, fresh, values):
                away, bits = distances(maximum, values, program)
                return [self.add_mass(s, away, fresh & (bits < t)) for s, t in zip(sums, thresholds, strict=True)]

            sums = self.sweep(step, [self.no_mass() for _ in thresholds], source)
            masses = [filters.total(Mass(*lanes), self.limb) for lanes in sums]
            return number_of(filters.below(mass, target) for mass in masses)

        return jnp.minimum(limit, self.narrow(holding))

    def draw(self, source: Source, maximum: Array, program: Program) -> Array:
        """The sampler's token."""
        filtered = (program.top_k < self.vocab) | (program.top_p < 1) | (program.furthest < INFINITY_BITS)

        def value_of(ids, values):
            return distances(maximum, values, program)[0] + self.noise(program, ids)

        plain = lambda: self.quickest(value_of, source)
        return lax.cond(filtered, lambda: self.search(source, maximum, program), plain)

    def search(self, source: Source, maximum: Array, program: Program) -> Array:
        """Races among fewer and fewer tokens, until a winner is one that the filters keep."""
        has_k, has_p = program.top_k < self.vocab, program.top_p < 1
        far = jnp.int32(INFINITY_BITS)
        nearest = lax.cond(has_k & has_p, lambda: self.kth(source, maximum, program), lambda: far)
        limit = jnp.minimum(program.furthest, nearest)
        won = self.race(source, maximum, program, limit, far + 1)
        target = filters.share(won.mass, program.top_p, self.limb)

        def again(state):
            token, at, _ = state
            nearer = self.race(source, maximum, program, limit, at)
            few = (nearer.count < program.top_k) & ((program.top_p >= 1) | filters.below(nearer.mass, target))
            kept = few | (nearer.token == NOBODY)
            token, at = jnp.where(kept, token, nearer.token), jnp.where(kept, at, nearer.at)
            return token, at, jnp.where(kept, False, at > 0)

        asks = (has_k | has_p) & (won.at > 0) & (won.token < NOBODY)
        return lax.while_loop(lambda state: state[2], again, (won.token, won.at, asks))[0]

    def distribution(self, source: Source, maximum: Array, program: Program) -> tuple[Distribution, Array]:
        """What the sampler draws from, and the draft's probability."""
        kth = lambda: jnp.minimum(program.furthest, self.kth(source, maximum, program))
        limit = lax.cond(program.top_k < self.vocab, kth, lambda: program.furthest)
        nucleus = lambda: self.nucleus(source, maximum, program, limit)
        limit = lax.cond(program.top_p < 1, nucleus, lambda: limit)
        mass, draft = self.mass(source, maximum, program, limit)
        whole = filters.to_float(mass, self.limb)
        return Distribution(maximum, limit, whole), draft / whole

    def judge(self, target: Source, draft: Source | None, maximum: Array, program: Program) -> Array:
        """The draft if it stands, else the token instead of it."""
        p, wanted = self.distribution(target, maximum, program)
        q, offered = None, jnp.float32(1)
        if draft is not None:
            q, offered = self.distribution(draft, self.largest(draft)[1], program)

        def race(weight_of):
            def value_of(ids, values, *others):
                weight = weight_of(ids, p.probabilities(values, program), *others)
                return jnp.where(weight > 0, self.noise(program, ids) - jnp.log(weight), FAR)

            return value_of

        def excess(ids, p_values, *q_values):
            if q is None:
                return p_values - (ids == program.draft).astype(jnp.float32)
            return p_values - q.probabilities(*q_values, program)

        def instead():
            sources = [target] if draft is None else [target, draft]
            token = self.quickest(race(excess), *sources)
            whole = lambda: self.quickest(race(lambda ids, p_values: p_values), target)
            return lax.cond(token == NOBODY, whole, lambda: token)

        return lax.cond(program.chance * offered >= wanted, instead, lambda: program.draft)


def distances(maximum: Array, values: Array, program: Program) -> tuple[Array, Array]:
    """The distances, and their bits."""
    away = (maximum - values) / program.temperature
    return away, lax.bitcast_convert_type(away, jnp.int32)


def log1p(x: Array) -> Array:
    """log(1 + x) for x in (-1, 0], from a log that is exact to the last bits (Kahan; Goldberg 1991, theorem 4)."""
    whole = lax.optimization_barrier(1 + x)  # XLA would take (1 + x) - 1 for x
    return jnp.where(whole == 1, x, jnp.log(whole) * (x / (whole - 1)))


def total(lanes: Array) -> Array:
    return jnp.sum(lanes, dtype=lanes.dtype)


def number_of(conditions) -> Array:
    """How many scalars are true."""
    return sum((condition.astype(jnp.int32) for condition in conditions), jnp.int32(0))
