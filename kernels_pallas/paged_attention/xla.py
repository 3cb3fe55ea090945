"""Paged attention for CPUs (and any other XLA device): online softmax over a work list of query tiles.

Two nested loops with counts known only at run time: over groups of tiles, and over the KV blocks of the
group's longest tile. One program serves every context length, and the work follows the sum of the contexts.

Row invariance: a block always holds `KV_BLOCK` keys counted from position 0, a row folds its blocks from
left to right, blocks that it does not see change nothing (exactly: m stays, the rest is multiplied by 1),
and products have at least `MIN_ROWS` query rows. So a row's bits do not depend on its tile, its group or the
page size (FACTS: "Rows do not depend on their company").
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels_pallas.paged_attention.work_list import CHUNK_GROUP, CHUNK_ROWS, SINGLE_GROUP, WorkList

KV_BLOCK = 64
MIN_ROWS = 8
MASKED = -1e30  # not -inf: a wholly masked block is then an exact no-op without any test for NaN


def paged_attention_xla(
    q: Float[Array, "tokens heads head_dim"],
    pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"],
    page_table: Int[Array, "slots max_pages"],
    token_slot: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    work: WorkList,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """What `paged_attention_reference` defines, for the rows that the work list names; other rows are junk.

    Products take the pages' dtype with float32 accumulation; softmax is float32.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = pages.shape[2]
    page_table = _whole_blocks(page_table, pages.shape[3])
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(pages.dtype)

    def attend_tiles(rows: Int[Array, "tiles tile_rows"]) -> Float[Array, "tiles tile_rows kv_heads group head_dim"]:
        tile_positions = jnp.where(rows < tokens, positions.at[rows].get(mode="clip"), -1)
        slots = token_slot.at[rows[:, 0]].get(mode="clip")
        return _attend(grouped.at[rows].get(mode="clip"), tile_positions, page_table[slots], pages, scale, window)

    def run(rows, num_groups, group_size, buffer, offset):
        """Fill `buffer[offset:]` tile by tile; rows [tiles, tile_rows] of flat rows, `tokens` for padding."""

        def body(group, buffer):
            group_rows = jax.lax.dynamic_slice_in_dim(rows, group * group_size, group_size)
            out = attend_tiles(group_rows).astype(buffer.dtype).reshape(-1, *buffer.shape[1:])
            return jax.lax.dynamic_update_slice_in_dim(buffer, out, offset + group * out.shape[0], 0)

        return jax.lax.fori_loop(jnp.int32(0), num_groups, body, buffer)

    offsets = jnp.arange(CHUNK_ROWS, dtype=jnp.int32)
    chunk_rows = jnp.where(offsets < work.chunk_count[:, None], work.chunk_first[:, None] + offsets, tokens)
    buffer = jnp.zeros((tokens + chunk_rows.size, kv_heads, heads // kv_heads, head_dim), q.dtype)
    buffer = run(work.single_rows[:, None], work.single_groups, SINGLE_GROUP, buffer, 0)
    buffer = run(chunk_rows, work.chunk_groups, CHUNK_GROUP, buffer, tokens)
    return buffer[work.place].reshape(tokens, heads, head_dim)


def _whole_blocks(page_table, page_size: int):
    """Pad the table so that every KV block's pages can be sliced out of it (small pages only)."""
    per_block = max(KV_BLOCK // page_size, 1)
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % per_block)))


def _attend(q, positions, table, pages, scale, window):
    """Online softmax of a group of tiles over the KV blocks that any of them sees.

    q [tiles, rows, kv_heads, group, head_dim], positions [tiles, rows] (-1 for padding), table [tiles, max_pages].
    """
    tiles, rows, kv_heads, group, head_dim = q.shape
    padding = max(MIN_ROWS - rows * group, 0)
    q = jnp.moveaxis(q, 2, 1).reshape(tiles, kv_heads, rows * group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    row_position = jnp.pad(jnp.repeat(positions, group, axis=1), ((0, 0), (0, padding)), constant_values=-1)
    precision = jax.lax.Precision.HIGHEST

    def fold(block, carry):
        m, l, o = carry
        keys, values = _kv_block(pages, table, block)
        scores = jnp.einsum(
            "thrd,thkd->thrk", q, keys, precision=precision, preferred_element_type=jnp.float32
        ) * jnp.float32(scale)
        key_position = block * KV_BLOCK + jnp.arange(KV_BLOCK, dtype=jnp.int32)
        visible = key_position <= row_position[..., None]
        if window is not None:
            visible &= key_position > row_position[..., None] - window
        visible = visible[:, None]
        new_m = jnp.maximum(m, jnp.where(visible, scores, MASKED).max(-1))
        weights = jnp.where(visible, jnp.exp(scores - new_m[..., None]), 0.0)
        rescale = jnp.exp(m - new_m)
        new_o = jnp.einsum(
            "thrk,thkd->thrd", weights.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32
        )
        return new_m, l * rescale + weights.sum(-1), o * rescale[..., None] + new_o

    last = positions.max() // KV_BLOCK + 1
    first = jnp.int32(0)
    if window is not None:
        earliest = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max).min()
        first = jnp.maximum(earliest - (window - 1), 0) // KV_BLOCK
    m = jnp.full(q.shape[:3], MASKED, jnp.float32)
    m, l, o = jax.lax.fori_loop(first, last, fold, (m, jnp.zeros_like(m), jnp.zeros(q.shape, jnp.float32)))
    o = o / jnp.maximum(l, 1e-30)[..., None]  # padding rows have l = 0
    o = o[:, :, : rows * group].reshape(tiles, kv_heads, rows, group, head_dim)
    return jnp.moveaxis(o, 2, 1)


def _kv_block(pages, table, block):
    """Keys and values [tiles, kv_heads, KV_BLOCK, head_dim] of one block: whole contiguous rows of the pool.

    Gathering from the pool as flat rows needs no transpose afterwards (FACTS: up to twice as fast).
    """
    num_pages, _, kv_heads, page_size, head_dim = pages.shape
    unit = min(page_size, KV_BLOCK)  # keys in one contiguous row
    units_per_page, units_per_block = page_size // unit, KV_BLOCK // unit
    first_unit = block * units_per_block
    ids = jax.lax.dynamic_slice_in_dim(table, first_unit // units_per_page, max(units_per_block // units_per_page, 1), 1)
    # Ids out of range can only come from junk behind the owned part of a table row: read any page there.
    ids = jnp.clip(ids, 0, num_pages - 1)[:, None, None, :]
    side = jnp.arange(2, dtype=jnp.int32)[:, None, None, None]
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, None, :, None]
    rows = ((jnp.moveaxis(ids, 0, 1) * 2 + side) * kv_heads + head) * units_per_page + first_unit % units_per_page
    tiles = table.shape[0]
    kv = pages.reshape(-1, unit * head_dim)[rows].reshape(2, tiles, kv_heads, KV_BLOCK, head_dim)
    return kv[0], kv[1]
