"""The product and the norm of a layer through the native library."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.kernels_pallas.cpu.library import Native, cpu_description, load_native

# With these instructions XLA's own bfloat16 products are, from 8 rows on, faster than arithmetic in float32 can
# be (177 GFLOP/s at 32 rows on two cores). native.cc does not know them; AVX-512 BF16 it does.
_TILES = "amx_bf16"


@dataclass(frozen=True)
class NativeLinear:
    """The product as native.cc computes it: a row's bits depend neither on the other rows nor on their number."""

    target: str
    name = "native"

    def __call__(
        self, x: Float[Array, "tokens in"], weight: Float[Array, "in ..."], out_dtype=None, *, count: Int[Array, ""]
    ) -> Array:
        """x @ weight [tokens, ...] with float32 accumulation, in `out_dtype` (None: as x).

        Only the first `count` rows are computed; the others are zeros.
        """
        columns = weight.shape[1:]
        out = jax.ShapeDtypeStruct((x.shape[0], math.prod(columns)), out_dtype or x.dtype)
        product = jax.ffi.ffi_call(self.target, out)(x, weight.reshape(weight.shape[0], -1), count.astype(jnp.int32))
        return product.reshape(x.shape[0], *columns)


@dataclass(frozen=True)
class NativeNorm:
    """The norm as native.cc computes it: a row's bits depend on that row alone."""

    target: str

    def __call__(
        self, x: Float[Array, "tokens ..."], scale: Float[Array, " size"], eps: float, *, count: Int[Array, ""]
    ) -> Array:
        """scale * x / rms(x) over the last axis; rows from `count` on are zeros."""
        call = jax.ffi.ffi_call(self.target, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x, scale, count.astype(jnp.int32), eps=np.float32(eps))


def choose_norm(*, native: bool) -> NativeNorm | None:
    """The norm of an engine that uses other functions of the library; None is XLA's own."""
    library = load_native() if native else None
    return NativeNorm(library.rms_norm) if isinstance(library, Native) else None


def has_bfloat16_tiles() -> bool:
    """Whether this CPU has instructions for tiles of it, which XLA uses."""
    return _TILES in cpu_description().split()
