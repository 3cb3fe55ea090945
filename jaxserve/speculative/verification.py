"""What the host is told of rows that draft tokens take part in."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxserve.speculative.acceptance import NO_DRAFT, NO_TOKEN, REJECTED


def reported(
    sampled: Int32[Array, " rows"],
    alive: Bool[Array, " rows"],
    real: Bool[Array, " rows"],
    counts: Bool[Array, " rows"],
) -> Int32[Array, " rows"]:
    """What the host reads for each row: a token, or why there is none."""
    token = jnp.where(alive, sampled, jnp.int32(NO_TOKEN))
    return jnp.where(counts, token, jnp.where(real, jnp.int32(REJECTED), jnp.int32(NO_DRAFT)))
