"""The prefill kernel: tiles of a prompt chunk's query tokens against their context, one pass, splits folded on the way.

Work      (tile, kv head, up to 128 columns of the values), taken in turns by programs that stay. A tile is a run of
          query tokens of one sequence.
Program   `workers` warpgroups compute, 64 rows each (tokens x the query heads that share the kv head), and one more
          copies pages into rings of keys and values, as far ahead as they reach, from one tile into the next.
Bytes     for each tile 2 * context * kv_heads * head_dim * itemsize of keys and values (from the L2 cache where several
          tiles of a sequence run together), 2 * tokens * heads * head_dim * itemsize of queries and results.
FLOP      4 * heads * head_dim for each pair of a query token and a key that it sees: 2 * tokens^2 * heads * head_dim
          for a whole prompt. With head_dim 256 half as many again: scores are computed for each half of the columns.
Floor     on an H200 (989 TFLOP/s) for Llama-3-8B (32 heads of 128): 0.14 ms a layer for a prompt of 4,096, 2.2 ms for
          16,384. Tiles of 32 tokens at 4 query heads a kv head make 128 FLOP a byte from the L2 cache.
"""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

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
from jaxserve.kernels_pallas.paged_attention.mosaic.config import KV_BLOCK, TileConfig, columns_of
from jaxserve.kernels_pallas.paged_attention.mosaic.online_softmax import Scale

COPY_REGISTERS = 32  # per thread of the copying warpgroup


class Tiles(NamedTuple):
    """Columns of the prefill tiles [tiles, 4], int32."""

    row: object  # first query row
    count: object  # query tokens
    slot: object
    position: object  # of the first query token


def compute_registers(workers: int) -> int:
    """Per thread of a computing warpgroup; more than the SM has (512 per thread of a warpgroup) would wait for ever."""
    return min(240, (512 - COPY_REGISTERS) // workers // 8 * 8)


def paged_prefill(
    q_rows: Float[Array, "kv_heads rows head_dim"],
    pages: Float[Array, "num_pages 2 kv_heads page_size head_dim"],
    page_table: Int32[Array, "slots max_pages"],
    num_tiles: Int32[Array, "1"],
    tiles: Int32[Array, "tiles 4"],
    out,
    *,
    group: int,
    scale: Scale,
    window: int | None,
    config: TileConfig,
) -> None:
    """Write attention of the tiles to `out`, a Ref [tokens * kv_heads, group, head_dim]; other rows stay."""
    kv_heads, _, head_dim = q_rows.shape
    page_size, columns = pages.shape[3], columns_of(head_dim)
    workers, stages, interpret = config.prefill_workers, config.prefill_stages, config.interpret
    worker_tokens = ROWS // group
    split_blocks = config.split_blocks
    dtype = pages.dtype

    def kernel(
        q_g, pieces_g, table_g, count_g, tiles_g, out_g, q_all, out_all, k_s, v_s, k_ready, v_ready, k_free, v_free
    ):
        worker = lax.axis_index("worker")
        shares = Share.count(count_g[0], kv_heads, head_dim)

        def tile_at(index):
            """(tile, share, its span, its blocks)"""
            share = Share.of(index, kv_heads, head_dim)
            tile = Tiles(*(tiles_g[share.row, i] for i in range(len(Tiles._fields))))
            span = Span(tile.position, tile.position + tile.count - 1, window)
            return tile, share, span, span.blocks()

        def compute():
            plgpu.set_max_registers(compute_registers(workers), action="increase")
            q_s, out_s = q_all.at[worker], out_all.at[worker]

            def attend_tile(index, slot):  # slot: of the rings, for the tile's first block
                tile, share, span, (first, last) = tile_at(index)
                row = tile.row + worker * worker_tokens
                load_queries(q_g, share.head, row * group, q_s)
                start = span.first + worker * worker_tokens
                positions = start + lax.div(hopper.row_index(), jnp.int32(group))
                mine = Span(start, jnp.minimum(start + (worker_tokens - 1), span.last), window)

                def take(block, carry):
                    state, slot = carry
                    plgpu.barrier_wait(k_ready.at[slot])
                    s = block_scores(q_s, k_s.at[slot], positions, mine, block, scale, interpret=interpret)
                    plgpu.barrier_arrive(k_free.at[slot])
                    plgpu.barrier_wait(v_ready.at[slot])
                    state = online_softmax.take_block(state, s, scale.factor, v_s.at[slot], interpret=interpret)
                    plgpu.barrier_arrive(v_free.at[slot])
                    return state, hopper.next_slot(slot, stages)

                def take_split(split, carry):
                    total, slot = carry
                    begin = jnp.maximum(split * split_blocks, first)
                    end = jnp.minimum((split + 1) * split_blocks, last)
                    state, slot = lax.fori_loop(begin, end, take, (online_softmax.empty(columns), slot))
                    return online_softmax.fold(total, online_softmax.finished(state)), slot

                begin_split = lax.div(first, jnp.int32(split_blocks))
                end_split = lax.div(last - 1, jnp.int32(split_blocks)) + 1
                start_state = online_softmax.empty(columns), slot
                total, slot = lax.fori_loop(begin_split, end_split, take_split, start_state)
                plgpu.wait_smem_to_gmem(0)  # the last tile's result has left
                # Read again where the result goes: there are no registers to keep it in.
                tile, share, _, _ = tile_at(lax.optimization_barrier(index))
                row = tile.row + worker * worker_tokens
                out_s[...] = online_softmax.normalised(total).astype(dtype)
                plgpu.commit_smem()

                def store(token, _):
                    rows = out_s.at[pl.ds(token * group, group)]
                    target = (row + token) * kv_heads + share.head
                    plgpu.copy_smem_to_gmem(rows, out_g.at[target, pl.ds(0, group), share.columns])

                my_count = jnp.clip(tile.count - worker * worker_tokens, 0, worker_tokens)
                lax.fori_loop(jnp.int32(0), my_count, store, None)
                return slot

            hopper.work_loop(shares, config.prefill_programs, attend_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        def copy():
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

            def copy_tile(index, carry):
                tile, share, span, (first, last) = tile_at(index)
                last_page = lax.div(span.last, jnp.int32(page_size))
                pages = Pages(pieces_g, table_g, kv_heads, page_size, tile.slot, last_page)

                def copy_block(block, carry):
                    number, slot = carry  # blocks that came before it, and the slot of the rings that it takes
                    ids = pages.ids(block)
                    pl.when(number >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                    pages.copy(ids, 0, share.head, pl.ds(0, head_dim), k_s.at[slot], k_ready.at[slot])
                    pl.when(number >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                    pages.copy(ids, 1, share.head, share.columns, v_s.at[slot], v_ready.at[slot])
                    return number + 1, hopper.next_slot(slot, stages)

                return lax.fori_loop(first, last, copy_block, carry)

            start = jnp.int32(0), jnp.int32(0)
            number, _ = hopper.work_loop(shares, config.prefill_programs, copy_tile, start)
            for slot in range(stages):  # leave no barrier behind that was passed and not waited for

                @pl.when(slot < number)
                def _(slot=slot):
                    plgpu.barrier_wait(k_free.at[slot])
                    plgpu.barrier_wait(v_free.at[slot])

        pl.when(worker < workers)(compute)
        pl.when(worker == workers)(copy)

    ring = lambda columns: plgpu.SMEM((stages, KV_BLOCK, columns), dtype, transforms=hopper.swizzled(dtype))
    ready = plgpu.Barrier(num_arrivals=max(KV_BLOCK // page_size, 1), num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=workers, num_barriers=stages)
    kernel.__name__ = "paged_prefill"
    plgpu.kernel(
        kernel,
        grid=(config.prefill_programs,),
        grid_names=("program",),
        num_threads=workers + 1,
        thread_name="worker",
        scratch_types={
            "q_all": plgpu.SMEM((workers, 1, ROWS, head_dim), dtype, transforms=hopper.swizzled(dtype)),
            "out_all": plgpu.SMEM((workers, ROWS, columns), dtype),
            "k_s": ring(head_dim),
            "v_s": ring(columns),
            "k_ready": ready,
            "v_ready": ready,
            "k_free": free,
            "v_free": free,
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(q_rows, pieces_of(pages), page_table, num_tiles, tiles, out)
