"""The decode kernel: a few query tokens of a sequence against its context, or against one split of it.

Work      (item, kv head, up to 128 columns of the values). An item is 1 to 16 consecutive query tokens of one sequence
          and either one split of the context or all of it; the rows of all its tokens that share a kv head are the
          first of a 64-row tile. The rest of the tile is junk that never leaves its row and is never stored.
Result    An item that covers all that its tokens see writes attention itself. Else it leaves (acc, top, mass) of its
          split in float32, and `combine` folds them: the same fold, in the same order, as an item that covers all.
Bytes     2 * context * kv_heads * head_dim * itemsize of keys and values, once for an item's tokens; 2 * tokens *
          heads * head_dim * itemsize of queries and results; and where splits are kept 2 * splits * tokens * heads *
          (head_dim + 32) * 4, a 2 % of a context of 512 keys a split with 4 query heads a kv head. With head_dim 256
          keys are read twice, by programs that run together: the second time from the L2 cache.
FLOP      4 * tokens * heads * context * head_dim, of which the hardware does 64 / (tokens * group) times as many.
Floor     on an H200 (4.8 TB/s) for Llama-3-8B (8 kv heads of 128, bf16): 0.85 ns a key, so 3.5 µs a layer for one
          sequence of 4,096, 224 µs for 64. The products are below it: 64 rows make 128 FLOP a byte, the ridge is 206.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels_pallas import hopper
from jaxserve.kernels_pallas.hopper import ROWS
from jaxserve.kernels_pallas.paged_attention.mosaic import online_softmax
from jaxserve.kernels_pallas.paged_attention.mosaic.blocks import (
    Pages,
    Share,
    Span,
    block_scores,
    load_queries,
    pieces_of,
)
from jaxserve.kernels_pallas.paged_attention.mosaic.config import KV_BLOCK, STATS, TileConfig, columns_of
from jaxserve.kernels_pallas.paged_attention.mosaic.online_softmax import Scale, State


class Items(NamedTuple):
    """Columns of the decode items [items, 7], int32."""

    row: object  # first query row
    count: object  # query tokens
    slot: object
    length: object  # keys up to the last query token's own; 0: the item is void
    split: object  # first split
    end_split: object  # behind the last
    place: object  # first row among the partial results


class Partials(NamedTuple):
    """Results of splits by (place of a query row, kv head); `stats` is the maximum in 16 columns, the mass in 16."""

    acc: Float32[Array, "places_and_heads group head_dim"]
    stats: Float32[Array, "places_and_heads group stats"]


def paged_decode(
    q_rows: Float[Array, "kv_heads rows head_dim"],
    pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"],
    page_table: Int32[Array, "slots max_pages"],
    num_items: Int32[Array, "1"],
    items: Int32[Array, "items 7"],
    out,
    *,
    group: int,
    num_places: int,
    scale: Scale,
    window: int | None,
    config: TileConfig,
) -> Partials:
    """Attention of the items. `out` is a Ref [tokens * kv_heads, group, head_dim]; only the items' rows are written."""
    kv_heads, _, head_dim = q_rows.shape
    page_size, columns = pages.shape[3], columns_of(head_dim)
    stages, interpret = config.decode_stages, config.interpret
    split_blocks = config.split_blocks
    dtype = pages.dtype

    def kernel(
        q_g, pieces_g, table_g, count_g, items_g, out_g, acc_g, stats_g, q_s, k_or_result, v_s, k_ready, v_ready
    ):
        k_s, (acc_s, stats_s), out_s = k_or_result  # results leave through the ring of keys, which is idle by then

        def item_at(index):
            """(item, share, its span, its first block, the one behind its last, whether that is all it sees)"""
            share = Share.of(index, kv_heads, head_dim)
            item = Items(*(items_g[share.row, i] for i in range(len(Items._fields))))
            span = Span(item.length - item.count, item.length - 1, window)
            begin, end = span.blocks()
            first = jnp.maximum(item.split * split_blocks, begin)
            last = jnp.minimum(item.end_split * split_blocks, end)
            return item, share, span, first, last, (first <= begin) & (last >= end)

        def attend_item(index):
            _, _, _, first, last, _ = item_at(index)
            pl.when(first < last)(lambda: attend_blocks(index))

        def attend_blocks(index):
            item, share, span, first, last, _ = item_at(index)
            last_page = lax.div(span.last, jnp.int32(page_size))
            pages = Pages(pieces_g, table_g, kv_heads, page_size, item.slot, last_page)

            def load(ids, slot):
                pages.copy(ids, 0, share.head, pl.ds(0, head_dim), k_s.at[slot], k_ready.at[slot])
                pages.copy(ids, 1, share.head, share.columns, v_s.at[slot], v_ready.at[slot])

            for i in range(stages):
                pl.when(first + i < last)(lambda i=i: load(pages.ids(first + i), jnp.int32(i)))
            load_queries(q_g, share.head, item.row * group, q_s)
            positions = span.first + lax.div(hopper.row_index(), jnp.int32(group))

            def take(block, carry):
                state, slot, ids = carry  # ids: of the block that follows into this slot, read one turn ahead
                plgpu.barrier_wait(k_ready.at[slot])
                s = block_scores(q_s, k_s.at[slot], positions, span, block, scale, interpret=interpret)
                plgpu.barrier_wait(v_ready.at[slot])
                state = online_softmax.take_block(state, s, scale.factor, v_s.at[slot], interpret=interpret)
                pl.when(block + stages < last)(lambda: load(ids, slot))
                return state, hopper.next_slot(slot, stages), pages.ids(block + stages + 1)

            def take_split(split, carry):
                total, *ring = carry
                start = jnp.maximum(split * split_blocks, first)
                stop = jnp.minimum((split + 1) * split_blocks, last)
                state, *ring = lax.fori_loop(start, stop, take, (online_softmax.empty(columns), *ring))
                return online_softmax.fold(total, online_softmax.finished(state)), *ring

            start = online_softmax.empty(columns), jnp.int32(0), pages.ids(first + stages)
            start_split = lax.div(first, jnp.int32(split_blocks))
            end_split = lax.div(last - 1, jnp.int32(split_blocks)) + 1
            total, *_ = lax.fori_loop(start_split, end_split, take_split, start)
            # Read again where the result goes: there are no registers to keep it in.
            item, share, _, _, _, finishes = item_at(lax.optimization_barrier(index))
            pl.when(finishes)(lambda: write_result(item, share, total))
            pl.when(jnp.logical_not(finishes))(lambda: write_partial(item, share, total))
            plgpu.wait_smem_to_gmem(0)

        def write_result(item, share, total: State):
            out_s[...] = online_softmax.normalised(total).astype(out_s.dtype)
            plgpu.commit_smem()

            def store(token, _):
                rows = out_s.at[pl.ds(token * group, group)]
                target = (item.row + token) * kv_heads + share.head
                plgpu.copy_smem_to_gmem(rows, out_g.at[target, pl.ds(0, group), share.columns])

            lax.fori_loop(jnp.int32(0), item.count, store, None)

        def write_partial(item, share, total: State):
            acc_s[...] = total.acc
            stats_s[...] = stats_tile(total)
            plgpu.commit_smem()

            def store(token, _):
                rows, target = pl.ds(token * group, group), (item.place + token) * kv_heads + share.head
                plgpu.copy_smem_to_gmem(acc_s.at[rows], acc_g.at[target, pl.ds(0, group), share.columns])
                once = share.part == 0  # all parts have the same
                pl.when(once)(lambda: plgpu.copy_smem_to_gmem(stats_s.at[rows], stats_g.at[target]))

            lax.fori_loop(jnp.int32(0), item.count, store, None)

        hopper.work_loop(Share.count(count_g[0], kv_heads, head_dim), config.decode_programs, attend_item)

    ring = lambda columns: plgpu.SMEM((stages, KV_BLOCK, columns), dtype, transforms=hopper.swizzled(dtype))
    ready = plgpu.Barrier(num_arrivals=max(KV_BLOCK // page_size, 1), num_barriers=stages)
    shape = lambda columns: jax.ShapeDtypeStruct((num_places * kv_heads, group, columns), jnp.float32)
    kernel.__name__ = "paged_decode"
    return Partials(
        *plgpu.kernel(
            kernel,
            out_type=[shape(head_dim), shape(STATS)],
            grid=(config.decode_programs,),
            grid_names=("program",),
            scratch_types={
                "q_s": plgpu.SMEM((1, ROWS, head_dim), dtype, transforms=hopper.swizzled(dtype)),
                "k_or_result": plgpu.RefUnion(
                    ring(head_dim),
                    [plgpu.SMEM((ROWS, columns), jnp.float32), plgpu.SMEM((ROWS, STATS), jnp.float32)],
                    plgpu.SMEM((ROWS, columns), dtype),
                ),
                "v_s": ring(columns),
                "k_ready": ready,
                "v_ready": ready,
            },
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
            interpret=interpret,
        )(q_rows, pieces_of(pages), page_table, num_items, items, out)
    )


def stats_tile(state: State) -> Float32[Array, "64 stats"]:
    """A state's maximum and mass as columns of a tile."""
    column = hopper.column_index(STATS)
    return jnp.where(column < STATS // 2, hopper.over_columns(state.top, STATS), hopper.over_columns(state.mass, STATS))


def state_of(acc: Float32[Array, "64 head_dim"], stats: Float32[Array, "64 stats"]) -> State:
    """The state that a tile of results and `stats_tile` hold."""
    column = hopper.column_index(STATS)
    top = jnp.where(column < STATS // 2, stats, -jnp.inf).max(axis=1)
    mass = jnp.where(column < STATS // 2, -jnp.inf, stats).max(axis=1)
    return State(acc, top, mass)
