"""The product in plain jnp: the definition that every implementation is compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def matmul_reference(x: Float[Array, "rows inner"], weight: Float[Array, "inner columns"], out_dtype=None) -> Array:
    """x @ weight accumulated in float32 and rounded once, to `out_dtype` (None: as x)."""
    product = jnp.dot(x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return product.astype(out_dtype or x.dtype)
