"""The sampler's noise: a pure function of (seed, position, token id) in plain uint32 arithmetic.

It uses neither jax.random nor its configuration, so a user's PRNG settings change nothing. One Threefry-2x32
block (Salmon et al. 2011, 20 rounds) per row makes two independent words of (seed, position); a short integer
hash mixes them with the token id, since the vocabulary is wide and Threefry would cost more than the logits.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry_2x32(
    key: tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]],
    counter: tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]],
) -> tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]]:
    """Threefry-2x32 with 20 rounds, elementwise."""
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


# What a (seed, position) is drawn for; each has random words of its own.
SAMPLING, ACCEPTANCE, RESIDUAL = 0, 1, 2


def row_keys(
    seeds: UInt32[Array, "rows 2"], positions: Int32[Array, " rows"], purpose: int = SAMPLING
) -> UInt32[Array, "rows 2"]:
    """Two random words for each (seed, position) and purpose."""
    counter = positions.astype(jnp.uint32)
    words = threefry_2x32((seeds[:, 0], seeds[:, 1]), (counter, jnp.full_like(counter, purpose)))
    return jnp.stack(words, axis=1)


def token_bits(
    first: UInt32[Array, "..."], second: UInt32[Array, "..."], ids: Int32[Array, "..."]
) -> UInt32[Array, "..."]:
    """32 random bits for each (row key, token id), which broadcast.

    Two multiply-xorshift rounds with one word of the key before each."""
    bits = ids.astype(jnp.uint32) + first
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> jnp.uint32(15))) + second
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x735A2D97)
    return bits ^ (bits >> jnp.uint32(15))


def uniform(bits: UInt32[Array, "*n"]) -> Float32[Array, "*n"]:
    """Uniform in (0, 1), fine near 0 (steps of 2^-31), where the race between tokens is decided."""
    # Through int32, which every CPU converts in vectors; uint32 it does not.
    value = (bits >> jnp.uint32(1)).astype(jnp.int32).astype(jnp.float32)
    return jnp.minimum(value * jnp.float32(2.0**-31) + jnp.float32(2.0**-32), jnp.float32(1 - 2.0**-24))


def negative_gumbel(keys: UInt32[Array, "rows 2"], ids: Int32[Array, "..."]) -> Float32[Array, "..."]:
    """log of an Exponential(1) variable for each (row, id): the token with the least of
    `-log p + negative_gumbel` is a sample of p. `ids` is [rows or 1, ...]."""
    shape = (-1,) + (1,) * (ids.ndim - 1)
    bits = token_bits(keys[:, 0].reshape(shape), keys[:, 1].reshape(shape), ids)
    return jnp.log(-jnp.log1p(-uniform(bits)))
