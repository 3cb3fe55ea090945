"""The combine kernel: folds the results of a sequence's splits, from left to right, as the other kernels do.

Work      (query row, kv head, up to 128 columns) of items that were split. Rows whose context turns out to lie in one
          split (it is shorter than the host thought, or the window is) were finished by the decode kernel and are
          passed over.
Bytes     splits * heads * (head_dim + 32) * 4 read for a row, heads * head_dim * itemsize written.
FLOP      4 * splits * heads * head_dim for a row: nothing beside the bytes.
Floor     on an H200 for Llama-3-8B (32 heads of 128): 4.3 ns for a split of a row, so 34 ns a layer for 4,096 keys
          (8 splits), 2.2 µs for 64 rows. A row's fold is a chain, one split after the other.
"""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxserve.kernels_pallas import hopper
from jaxserve.kernels_pallas.hopper import ROWS
from jaxserve.kernels_pallas.paged_attention.mosaic import online_softmax
from jaxserve.kernels_pallas.paged_attention.mosaic.blocks import Share, Span
from jaxserve.kernels_pallas.paged_attention.mosaic.config import STATS, TileConfig, columns_of
from jaxserve.kernels_pallas.paged_attention.mosaic.decode import Partials, state_of


class SplitRows(NamedTuple):
    """Columns of the query rows whose items were split [rows, 5], int32."""

    row: object
    token: object  # its number in its item
    count: object  # query tokens of the item
    length: object  # keys up to the item's last token's own; 0: there is no such row
    place: object  # of split 0 and token 0 of the item


def combine_splits(
    partials: Partials,
    num_rows: Int32[Array, "1"],
    rows: Int32[Array, "rows 5"],
    out,
    *,
    kv_heads: int,
    window: int | None,
    config: TileConfig,
    stages: int = 2,
) -> None:
    """Write attention of the rows to `out`, a Ref [tokens * kv_heads, group, head_dim]."""
    _, group, head_dim = partials.acc.shape
    dtype, interpret = out.dtype, config.interpret
    columns = columns_of(head_dim)
    split_blocks = config.split_blocks

    def kernel(acc_g, stats_g, count_g, rows_g, out_g, acc_s, stats_s, out_s, ready):
        def combine_row(index):
            share = Share.of(index, kv_heads, head_dim)
            row = SplitRows(*(rows_g[share.row, i] for i in range(len(SplitRows._fields))))
            begin, end = Span(row.length - row.count, row.length - 1, window).blocks()
            first = lax.div(begin, jnp.int32(split_blocks))
            last = lax.div(end - 1, jnp.int32(split_blocks)) + 1
            pl.when(last - first > 1)(lambda: fold_row(row, share.head, share.columns, first, last))

        def fold_row(row, head, mine, first, last):

            def load(split, slot):
                source = (row.place + split * row.count + row.token) * kv_heads + head
                rows = pl.ds(0, group)
                plgpu.copy_gmem_to_smem(acc_g.at[source, rows, mine], acc_s.at[slot, rows], ready.at[slot])
                plgpu.copy_gmem_to_smem(stats_g.at[source], stats_s.at[slot, rows], ready.at[slot])

            def take(split, carry):
                total, slot = carry
                plgpu.barrier_wait(ready.at[slot])
                acc = plgpu.load(acc_s.at[slot], layout=plgpu.Layout.WGMMA, optimized=False)
                stats = plgpu.load(stats_s.at[slot], layout=plgpu.Layout.WGMMA, optimized=False)
                plgpu.commit_smem()
                pl.when(split + stages < last)(lambda: load(split + stages, slot))
                return online_softmax.fold(total, state_of(acc, stats)), hopper.next_slot(slot, stages)

            for i in range(stages):
                pl.when(first + i < last)(lambda i=i: load(first + i, jnp.int32(i)))
            total, _ = lax.fori_loop(first, last, take, (online_softmax.empty(columns), jnp.int32(0)))
            out_s[...] = online_softmax.normalised(total).astype(dtype)
            plgpu.commit_smem()
            rows = pl.ds(0, group)
            plgpu.copy_smem_to_gmem(out_s.at[rows], out_g.at[row.row * kv_heads + head, rows, mine])
            plgpu.wait_smem_to_gmem(0)

        hopper.work_loop(Share.count(count_g[0], kv_heads, head_dim), config.decode_programs, combine_row)

    kernel.__name__ = "combine_splits"
    plgpu.kernel(
        kernel,
        grid=(config.decode_programs,),
        grid_names=("program",),
        scratch_types={
            "acc_s": plgpu.SMEM((stages, ROWS, columns), jnp.float32),
            "stats_s": plgpu.SMEM((stages, ROWS, STATS), jnp.float32),
            "out_s": plgpu.SMEM((ROWS, columns), dtype),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(partials.acc, partials.stats, num_rows, rows, out)
