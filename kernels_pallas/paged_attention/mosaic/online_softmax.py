"""The arithmetic that the kernels share, one function for each step, so that a row has the same bits in all of them.

A row's scores become (acc, top, mass): acc = sum of 2^(s - top) v, mass = sum of 2^(s - top), with s in units of log2.
Blocks of 64 keys are taken into a split's state from left to right, and splits of 512 keys are folded into the row's
from left to right, whether one program does it all or a later kernel folds what many wrote.

Within a split top is the largest s so far: its weight is 1, which rounding to the dtype of the values leaves alone. The
mass counts the weights as they are rounded, so that what all values have in common is not rounded with them. `xla` has
the first of the two alone; its mean square error is larger (see the tests). Both kernels that take blocks do so with
the same instructions, down to the multiplications and additions that a compiler contracts: the compiled PTX is asked.

A finished split is scaled so that its top is whole, and splits fold by whole powers of two only, which is exact: so it
does not matter in which kernel a compiler contracts that multiplication with the addition that follows.

A row that sees nothing of a block or a split is not changed by it, exactly: `top` starts at a finite number, masked
scores are -inf, so their weights are 0 and the factors 1.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from jaxserve.kernels_pallas import hopper
from jaxserve.kernels_pallas.hopper import Interpret

LOWEST = -1e30  # where a maximum starts; finite, so that 2^(top - top) is never 2^nan
LOG2_E = 1.4426950408889634


class State(NamedTuple):
    """What a tile's rows have seen so far."""

    acc: Float32[Array, "64 head_dim"]
    top: Float32[Array, "64"]
    mass: Float32[Array, "64"]


def empty(head_dim: int) -> State:
    return State(hopper.zeros(head_dim), hopper.row_vector(LOWEST), hopper.row_vector(0.0))


class Scale(NamedTuple):
    """From raw scores to units of log2: s * factor, or factor * tanh(s * inner) with a logit soft cap."""

    factor: float
    inner: float | None

    @classmethod
    def of(cls, scale: float, logit_soft_cap: float | None) -> "Scale":
        if logit_soft_cap is None:
            return cls(scale * LOG2_E, None)
        return cls(logit_soft_cap * LOG2_E, scale / logit_soft_cap)

    def cap(self, s: Float32[Array, "64 keys"]) -> Float32[Array, "64 keys"]:
        """tanh where there is a cap; from 2^x, because the hardware's own tanh has 11 bits."""
        if self.inner is None:
            return s
        return 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * self.inner * LOG2_E)))


def mask(s: Float32[Array, "64 keys"], first_key, positions: Array, window: int | None) -> Float32[Array, "64 keys"]:
    """-inf where a row's position does not see a key. It comes before the factor: what follows is then the same
    arithmetic in masked and other blocks, down to the multiplications and additions that a compiler contracts."""
    distance = hopper.over_columns(positions, s.shape[1]) - (first_key + hopper.column_index(s.shape[1]))
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return jnp.where(visible, s, -jnp.inf)


def take_block(state: State, s: Float32[Array, "64 keys"], factor: float, v_s, *, interpret: Interpret) -> State:
    """Take a block of scores and its values (in SMEM) into a split's state."""
    keys, head_dim = s.shape[1], state.acc.shape[1]
    top = jnp.maximum(state.top, s.max(axis=1) * factor)
    decay = jnp.exp2(state.top - top)
    weights = jnp.exp2(s * factor - hopper.over_columns(top, keys)).astype(v_s.dtype)
    mass = state.mass * decay + weights.astype(jnp.float32).sum(axis=1)
    acc = state.acc * hopper.over_columns(decay, head_dim)
    acc = hopper.accumulate_product(acc, weights, v_s, interpret=interpret)
    return State(acc, top, mass)


def finished(split: State) -> State:
    """A split that has taken all its blocks, at the nearest whole `top`."""
    top = lax.round(split.top, lax.RoundingMethod.TO_NEAREST_EVEN)
    factor = jnp.exp2(split.top - top)
    return State(split.acc * hopper.over_columns(factor, split.acc.shape[1]), top, split.mass * factor)


def fold(total: State, split: State) -> State:
    """Fold the next finished split into what came before it. `fold(empty, fold(empty, x))` is `fold(empty, x)`."""
    head_dim = total.acc.shape[1]
    top = jnp.maximum(total.top, split.top)
    old, new = _power_of_two(total.top - top), _power_of_two(split.top - top)
    acc = total.acc * hopper.over_columns(old, head_dim) + split.acc * hopper.over_columns(new, head_dim)
    return State(acc, top, total.mass * old + split.mass * new)


def normalised(total: State) -> Float32[Array, "64 head_dim"]:
    """Attention of rows that have seen at least one key; other rows are junk."""
    return total.acc / hopper.over_columns(total.mass, total.acc.shape[1])


def _power_of_two(exponent: Float32[Array, "64"]) -> Float32[Array, "64"]:
    """2^exponent, exactly, of whole numbers up to 0; 0 below -126. Put together from its bits: exp2 may approximate."""
    bits = (jnp.maximum(exponent, -127.0) + 127.0).astype(jnp.int32) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)
