"""Paged attention on Hopper: decode, combine and prefill kernels in Pallas, over one work list.

A row's bits depend on its own queries, keys and values alone: keys are taken in blocks of 64 counted from position 0,
and every 512 keys are folded into the row's result, whichever kernel computes it, in whatever company. A context is
split over programs at the same places. What that costs against splitting as the batch would like it: at batch 1 a
context of 4,096 keys is 8 splits times 8 kv heads = 64 programs for 132 multiprocessors, which read 64 KiB/µs each at
best, so about 6 µs a layer where the floor is 3.5; the layer's weights take 105 µs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxserve.kernels_pallas.hopper import ROWS
from jaxserve.kernels_pallas.paged_attention.mosaic.blocks import rows_by_head
from jaxserve.kernels_pallas.paged_attention.mosaic.combine import combine_splits
from jaxserve.kernels_pallas.paged_attention.mosaic.config import (
    WHOLE,
    TileConfig,
    fits,
    item_tokens,
    tile_tokens,
)
from jaxserve.kernels_pallas.paged_attention.mosaic.decode import paged_decode
from jaxserve.kernels_pallas.paged_attention.mosaic.online_softmax import Scale
from jaxserve.kernels_pallas.paged_attention.mosaic.prefill import paged_prefill
from jaxserve.kernels_pallas.paged_attention.mosaic.work_list import WorkFormat, WorkList

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
DEFAULT_PAGE_SIZE = 64  # a page is a block: one bulk copy of 16 KiB at head_dim 128
_END = 2**24  # behind every split


class Prepared(NamedTuple):
    """A step's work list with everything in it that all layers share; columns as the kernels name them."""

    page_table: Int32[Array, "slots max_pages"]
    num_items: Int32[Array, "1"]
    items: Int32[Array, "items 7"]
    num_split_rows: Int32[Array, "1"]
    split_rows: Int32[Array, "split_rows 5"]
    num_tiles: Int32[Array, "1"]
    tiles: Int32[Array, "tiles 4"]


def prepare(
    work: WorkList,
    page_table: Int[Array, "slots max_pages"],
    token_slot: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    *,
    num_pages: int,
    page_size: int,
) -> Prepared:
    """What `MosaicAttention` needs besides queries and pages; once a step. Lengths are what `positions` says, and a run
    is as long as it has rows with a position: drafts that the host planned and that do not exist are behind them."""
    last_row = len(positions) - 1
    slot_of = lambda rows: jnp.minimum(token_slot[jnp.minimum(rows, last_row)], page_table.shape[0] - 1)
    before = jnp.pad(jnp.cumsum((positions >= 0).astype(jnp.int32), dtype=jnp.int32), (1, 0))
    exist = lambda rows, counts: before[jnp.minimum(rows + counts, last_row + 1)] - before[rows]
    length_of = lambda rows, counts: jnp.where(counts > 0, positions[jnp.clip(rows + counts - 1, 0, last_row)] + 1, 0)

    piece_count = exist(work.piece_row, work.piece_count)
    piece_length = length_of(work.piece_row, piece_count)
    piece_slot = slot_of(work.piece_row)
    of_piece = lambda values: values[work.item_piece]
    split = jnp.maximum(work.item_split, 0)
    items = [
        of_piece(work.piece_row),
        of_piece(piece_count),
        of_piece(piece_slot),
        of_piece(piece_length),
        split,
        jnp.where(work.item_split == WHOLE, _END, split + 1),
        of_piece(work.piece_place) + split * of_piece(piece_count),
    ]
    piece = work.split_piece
    token = work.split_row - work.piece_row[piece]
    row_length = jnp.where(token < piece_count[piece], piece_length[piece], 0)
    split_rows = [work.split_row, token, piece_count[piece], row_length, work.piece_place[piece]]
    tile_count = exist(work.tile_row, work.tile_count)
    tiles = [work.tile_row, tile_count, slot_of(work.tile_row), positions[jnp.minimum(work.tile_row, last_row)]]
    columns = lambda values: jnp.stack([value.astype(jnp.int32) for value in values], axis=1)
    count = lambda value: value.astype(jnp.int32)[None]
    return Prepared(
        page_table.astype(jnp.int32),
        count(work.num_items),
        columns(items),
        count(work.num_split_rows),
        columns(split_rows),
        count(work.num_tiles),
        columns(tiles),
    )


@dataclass(frozen=True)
class MosaicAttention:
    """`attend` of the contract."""

    config: TileConfig
    work: WorkFormat

    def __call__(
        self,
        q: Float[Array, "tokens heads head_dim"],
        pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"],
        prepared: Prepared,
        *,
        scale: float,
        window: int | None = None,
        logit_soft_cap: float | None = None,
    ) -> Float[Array, "tokens heads head_dim"]:
        """What `paged_attention_reference` defines, for the rows that the work list names; other rows are zeros."""
        tokens, heads, head_dim = q.shape
        kv_heads = pages.shape[2]
        group = heads // kv_heads
        shared = {
            "group": group,
            "scale": Scale.of(scale, logit_soft_cap),
            "window": window,
            "config": self.config,
        }
        q_rows = rows_by_head(q.astype(pages.dtype), kv_heads, self.config.prefill_workers * ROWS)
        zeros = jnp.zeros((tokens * kv_heads, group, head_dim), pages.dtype)
        # Not before the queries are there: XLA would fill every layer's at the start of the step, and keep them.
        q_rows, zeros = lax.optimization_barrier((q_rows, zeros))
        out = jax.new_ref(zeros)
        if len(prepared.items):
            places = self.work.num_places(tokens)
            partials = paged_decode(
                q_rows,
                pages,
                prepared.page_table,
                prepared.num_items,
                prepared.items,
                out,
                num_places=max(places, 1),
                **shared,
            )
            if places:
                combine_splits(
                    partials,
                    prepared.num_split_rows,
                    prepared.split_rows,
                    out,
                    kv_heads=kv_heads,
                    window=window,
                    config=self.config,
                )
        if len(prepared.tiles):
            paged_prefill(q_rows, pages, prepared.page_table, prepared.num_tiles, prepared.tiles, out, **shared)
        return out[...].reshape(tokens, heads, head_dim).astype(q.dtype)


def not_taken(*, head_dim: int, group: int, dtype: jnp.dtype) -> str | None:
    """What about a model the kernels do not take, or None if they take it."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype={jnp.dtype(dtype).name} is not one of {', '.join(DTYPES)}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if group > ROWS:
        return f"{group} query heads a kv head are more than {ROWS}"
    return None


def mosaic_attention(
    *, head_dim: int, group: int, max_model_len: int, config: TileConfig | None = None
) -> MosaicAttention:
    """The kernels for a model with `group` query heads a kv head and contexts of at most `max_model_len`."""
    config = config or TileConfig.for_shape(head_dim)
    if not fits(config, head_dim):
        raise ValueError(f"{config}: its tiles of head_dim={head_dim} must fit the shared memory of a program")
    work = WorkFormat(
        item_tokens=item_tokens(group),
        tile_tokens=tile_tokens(group, config.prefill_workers),
        max_splits=-(-max_model_len // config.split),
        max_places=config.max_partial_rows,
        small_bucket=config.small_bucket,
        split=config.split,
    )
    return MosaicAttention(config, work)
