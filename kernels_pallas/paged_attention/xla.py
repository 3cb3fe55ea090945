"""Paged attention for CPUs (and any other XLA device): online softmax over a work list of query tiles.

Two nested loops with counts known only at run time: over groups of tiles, and over the KV blocks of the
group's longest tile. One program serves every context length, and the work follows the sum of the contexts.

Row invariance: a block always holds `KV_BLOCK` keys counted from position 0, a row folds its blocks from
left to right, blocks that it does not see change nothing (exactly: m stays, the rest is multiplied by 1),
and products have at least `MIN_ROWS` query rows. So a row's bits do not depend on its tile, its group or the
page size (FACTS: "Rows do not depend on their company").

What does not depend on the layer is computed once a step by `prepare`: an operation here is compiled as often
as the model has layers, and their number decides how long compilation takes.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.kernels_pallas.paged_attention.work_list import CHUNK_GROUP, CHUNK_ROWS, SINGLE_GROUP, WorkList

KV_BLOCK = 64
MIN_ROWS = 8
MASKED = -1e30  # not -inf: a wholly masked block is then an exact no-op without any test for NaN
_NEVER = 2**30


class Tiles(NamedTuple):
    """The tiles of one kind, in groups that are processed together; padding rows have position -1."""

    num_groups: Int[Array, ""]
    rows: Int[Array, "groups size tile_rows"]  # flat query rows
    positions: Int[Array, "groups size tile_rows"]
    units: Int[Array, "groups size max_units"]  # see `_units`
    earliest: Int[Array, " groups"]  # least and greatest position of a group
    latest: Int[Array, " groups"]


class Prepared(NamedTuple):
    """A step's work list with everything in it that all layers share. `chunks` is None in the smallest buckets."""

    singles: Tiles
    chunks: Tiles | None
    place: Int[Array, " tokens"]


def prepare(
    work: WorkList,
    page_table: Int[Array, "slots max_pages"],
    token_slot: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    *,
    num_pages: int,
    page_size: int,
) -> Prepared:
    """What `paged_attention_xla` needs besides queries and pages; once a step."""
    tokens = token_slot.shape[0]
    units = _units(page_table, num_pages, page_size)

    def tiles(num_groups, rows, group_size: int) -> Tiles:
        inside = jnp.minimum(rows, tokens - 1)
        tile_positions = jnp.where(rows < tokens, positions[inside], -1)
        slots = jnp.minimum(token_slot[inside[:, 0]], page_table.shape[0] - 1)
        grouped = lambda values: values.reshape(-1, group_size, *values.shape[1:])
        where = grouped(tile_positions)
        earliest = jnp.where(where >= 0, where, _NEVER).min((1, 2))
        return Tiles(num_groups, grouped(inside), where, grouped(units[slots]), earliest, where.max((1, 2)))

    offsets = jnp.arange(CHUNK_ROWS, dtype=jnp.int32)
    chunk_rows = jnp.where(offsets < work.chunk_count[:, None], work.chunk_first[:, None] + offsets, tokens)
    chunks = tiles(work.chunk_groups, chunk_rows, CHUNK_GROUP) if work.chunk_count.shape[0] else None
    return Prepared(tiles(work.single_groups, work.single_rows[:, None], SINGLE_GROUP), chunks, work.place)


def paged_attention_xla(
    q: Float[Array, "tokens heads head_dim"],
    pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"],
    prepared: Prepared,
    *,
    scale: float,
    window: int | None = None,
    logit_soft_cap: float | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """What `paged_attention_reference` defines, for the rows that the work list names; other rows are junk.

    Products take the pages' dtype with float32 accumulation; softmax is float32.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = pages.shape[2]
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(pages.dtype)
    attend = partial(_attend_tiles, scale=scale, window=window, logit_soft_cap=logit_soft_cap)
    parts = [attend(grouped, pages, tiles) for tiles in prepared[:2] if tiles is not None]
    results = parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)
    return results[prepared.place].reshape(tokens, heads, head_dim).astype(q.dtype)


def _attend_tiles(q, pages, tiles: Tiles, *, scale: float, window: int | None, logit_soft_cap: float | None):
    """Results [all tile rows, kv_heads, group, head_dim] in the order of the tiles; q [tokens, ...same]."""
    groups, size, tile_rows = tiles.rows.shape
    _, kv_heads, group, head_dim = q.shape
    rows = tile_rows * group
    padding = max(MIN_ROWS - rows, 0)
    pad = lambda values, axis: jnp.pad(
        values, [(0, padding if i == axis else 0) for i in range(values.ndim)], mode="edge"
    )
    # [groups, size, kv_heads, rows, head_dim]: the rows of a tile that share a KV head stand together.
    queries = jnp.moveaxis(q[tiles.rows], 3, 2).reshape(groups, size, kv_heads, rows, head_dim)
    queries = pad(queries, 3)
    positions = pad(jnp.repeat(tiles.positions, group, axis=2), 2)

    def body(index, results):
        at = lambda values: lax.dynamic_index_in_dim(values, index, keepdims=False)
        last = lax.div(at(tiles.latest), jnp.int32(KV_BLOCK)) + 1
        first = jnp.int32(0)
        if window is not None:
            first = lax.div(jnp.maximum(at(tiles.earliest) - (window - 1), 0), jnp.int32(KV_BLOCK))
        out = _online_softmax(
            at(queries), at(positions), at(tiles.units), pages, first, last, scale, window, logit_soft_cap
        )
        return lax.dynamic_update_index_in_dim(results, out, index, 0)

    results = lax.fori_loop(jnp.int32(0), tiles.num_groups, body, jnp.zeros(queries.shape, jnp.float32))
    results = results[:, :, :, :rows].reshape(groups, size, kv_heads, tile_rows, group, head_dim)
    return jnp.moveaxis(results, 3, 2).reshape(-1, kv_heads, group, head_dim)


def _online_softmax(q, positions, units, pages, first, last, scale, window, logit_soft_cap):
    """A group of tiles over KV blocks first..last-1; q [tiles, kv_heads, rows, head_dim], positions [tiles, rows]."""
    dot = lambda subscripts, a, b: jnp.einsum(
        subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    offsets = jnp.arange(KV_BLOCK, dtype=jnp.int32)

    def fold(block, carry):
        m, total, o = carry
        keys, values = _kv_block(pages, units, block)
        distance = positions[..., None] - (block * KV_BLOCK + offsets)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        visible = lax.broadcast_in_dim(visible, (*q.shape[:3], KV_BLOCK), (0, 2, 3))
        scores = dot("thrd,thkd->thrk", q, keys) * jnp.float32(scale)
        if logit_soft_cap is not None:
            scores = jnp.float32(logit_soft_cap) * jnp.tanh(scores / jnp.float32(logit_soft_cap))
        scores = lax.select(visible, scores, jnp.full(visible.shape, MASKED, jnp.float32))
        new_m = jnp.maximum(m, scores.max(-1))
        weights = lax.select(visible, jnp.exp(scores - new_m[..., None]), jnp.zeros(visible.shape, jnp.float32))
        rescale = jnp.exp(m - new_m)
        new_o = dot("thrk,thkd->thrd", weights.astype(values.dtype), values)
        return new_m, total * rescale + weights.sum(-1), o * rescale[..., None] + new_o

    m = jnp.full(q.shape[:3], MASKED, jnp.float32)
    m, total, o = lax.fori_loop(first, last, fold, (m, jnp.zeros_like(m), jnp.zeros(q.shape, jnp.float32)))
    return o / jnp.maximum(total, 1e-30)[..., None]  # padding rows may have a total of 0


def _units(page_table, num_pages: int, page_size: int):
    """The table in units of min(page_size, KV_BLOCK) keys, [slots, max_units], padded to whole KV blocks.

    A unit is a contiguous row of the pool. It is numbered page * units_per_page + part; `_kv_block` goes on from there.
    """
    per_page = max(page_size // KV_BLOCK, 1)
    # Ids out of range can only come from junk behind the owned part of a table row: read any page there.
    units = jnp.clip(page_table, 0, num_pages - 1)[:, :, None] * per_page + jnp.arange(per_page, dtype=jnp.int32)
    units = units.reshape(page_table.shape[0], -1)
    per_block = max(KV_BLOCK // page_size, 1)
    return jnp.pad(units, ((0, 0), (0, -units.shape[1] % per_block)))


def _kv_block(pages, units, block):
    """Keys and values [tiles, kv_heads, KV_BLOCK, head_dim] of one block: whole contiguous rows of the pool.

    Gathering from the pool as flat rows needs no transpose afterwards (FACTS: up to twice as fast).
    """
    _, _, kv_heads, page_size, head_dim = pages.shape
    unit_size = min(page_size, KV_BLOCK)
    per_page, per_block = page_size // unit_size, KV_BLOCK // unit_size
    units = lax.dynamic_slice_in_dim(units, block * per_block, per_block, 1)[None, :, None, :]
    side_and_head = jnp.arange(2 * kv_heads, dtype=jnp.int32).reshape(2, 1, kv_heads, 1)
    rows = _pool_rows(units, side_and_head, 2 * kv_heads, per_page)
    flat = pages.reshape(-1, unit_size * head_dim)
    kv = flat.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)
    kv = kv.reshape(2, units.shape[1], kv_heads, KV_BLOCK, head_dim)
    return kv[0], kv[1]


def _pool_rows(units, side_and_head, sides_and_heads: int, per_page: int):
    """Rows of the flat pool for units (page * per_page + part) and their side and head."""
    if per_page == 1:
        return units * sides_and_heads + side_and_head
    page, part = lax.div(units, jnp.int32(per_page)), lax.rem(units, jnp.int32(per_page))
    return (page * sides_and_heads + side_and_head) * per_page + part
