"""Paged attention in plain jnp: the definition that every implementation is compared with."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Prepared(NamedTuple):
    """The page table and where each query row stands in it."""

    page_table: Int[Array, "slots max_pages"]
    token_slot: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]


def prepare(work, page_table, token_slot, positions, *, num_pages: int, page_size: int) -> Prepared:
    """Nothing to prepare: the definition needs no work list."""
    return Prepared(page_table, token_slot, positions)


def paged_attention_reference(
    q: Float[Array, "tokens heads head_dim"],
    pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"],
    prepared: Prepared,
    *,
    scale: float,
    window: int | None = None,
    logit_soft_cap: float | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Each query row attends to the keys of its slot at positions 0 to its own, the last `window` of them. Scaled
    scores become logit_soft_cap * tanh(scores / logit_soft_cap) where there is a cap.

    Query head h reads KV head h // (heads // kv_heads). Everything is computed in float32 over the whole
    page table, so cost grows with tokens × max_pages: use it for tests and small contexts. A row whose
    position is negative is padding and gives zeros.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = pages.shape[2]
    page_table, token_slot, positions = prepared
    kv = pages[page_table[token_slot]]  # [tokens, max_pages, 2, kv_heads, page_size, head_dim]
    kv = jnp.moveaxis(kv, (2, 3), (1, 2)).reshape(tokens, 2, kv_heads, -1, head_dim).astype(jnp.float32)
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("thgd,thkd->thgk", grouped, kv[:, 0], precision=jax.lax.Precision.HIGHEST)
    keys = jnp.arange(kv.shape[3], dtype=jnp.int32)[None]
    visible = keys <= positions[:, None]
    if window is not None:
        visible &= keys > positions[:, None] - window
    visible = visible[:, None, None]
    scores = scores * jnp.float32(scale)
    if logit_soft_cap is not None:
        scores = jnp.float32(logit_soft_cap) * jnp.tanh(scores / jnp.float32(logit_soft_cap))
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = jnp.where(visible, jnp.exp(scores - scores.max(-1, keepdims=True, initial=-1e30)), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    # Masked values must not contribute even if they are not finite: 0 * NaN is NaN.
    values = jnp.where(visible[:, :, 0, :, None], kv[:, 1], 0.0)
    out = jnp.einsum("thgk,thkd->thgd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return out.reshape(tokens, heads, head_dim).astype(q.dtype)
