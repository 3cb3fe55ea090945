"""The product for Hopper: bulk copies into a ring of K tiles, `wgmma`, one order along K for every number of rows.

x [rows, inner] times weight [inner, columns], as `models/weights.py` keeps it. Each block of threads stays on its SM
and computes one tile of the result after the other; a warpgroup of its own keeps the ring full, also across tiles, so
that the memory never waits for the end of a tile. One or two warpgroups multiply.

Why a row's bits do not depend on its company: each element is one accumulator that takes the products of 16 values of
K at a time, from 0 on, whatever the tile. There is no split of K, no other instruction for few rows, and a row's place
in a tile does not matter. What is assumed of the hardware, and looked at by `make gpu-check`, is that
`wgmma.m64nNk16` gives an element the same bits for N = 64 and N = 128.

Edges: the last tile of rows or columns is moved back so that it ends with the array; what its neighbour computes is
not stored again. So no copy leaves the array. Fewer rows than a tile are copied alone; the tile's other rows are junk
that stays in its rows.

The floor: (rows * inner + inner * columns) * itemsize + rows * columns * out_itemsize bytes, each read or
written once, and 2 * rows * inner * columns operations (`kernels_pallas/roofline.py`). Up to some 200 rows the
weights' bytes are the larger part: 16 GB a step for Llama-3-8B in bfloat16, 3.35 ms on an H200.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels_pallas.hopper import SMS, Interpret, swizzled
from jaxserve.kernels_pallas.matmul.tiles import INNER, TileConfig, choose_tiles

ROW_MULTIPLE = 8  # a swizzled tile is copied in units of 8 rows
DTYPES = ("bfloat16", "float16")
_PIECE = 64  # rows and columns of the result that leave shared memory at once
_COPY_REGISTERS = 24  # per thread of the copying warpgroup


def unsupported(rows: int, inner: int, columns: int, dtype: jnp.dtype) -> str | None:
    """Why this kernel does not take such a product, or None."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"it multiplies {' and '.join(DTYPES)}, not {jnp.dtype(dtype).name}"
    if rows % ROW_MULTIPLE:
        return f"rows must be a multiple of {ROW_MULTIPLE}, not {rows}"
    if inner % INNER or columns % _PIECE:
        return f"both sides of a weight must be multiples of 64, not {inner} and {columns}"
    return None


def matmul(
    x: Float[Array, "rows inner"],
    weight: Float[Array, "inner columns"],
    out_dtype=None,
    *,
    config: TileConfig | None = None,
    blocks: int = SMS,
    interpret: Interpret = None,
) -> Float[Array, "rows columns"]:
    """What `matmul_reference` defines. ValueError for what `unsupported` names.

    `blocks` of threads share the tiles; `interpret` as in `hopper.py`.
    """
    (rows, inner), columns = x.shape, weight.shape[1]
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if reason := unsupported(rows, inner, columns, x.dtype):
        raise ValueError(f"x [{rows}, {inner}] @ weight [{inner}, {columns}]: {reason}")
    if config is None:
        config = choose_tiles(rows, columns, itemsize=x.dtype.itemsize, out_itemsize=out_dtype.itemsize)
    tiles = _Tiles(rows, columns, config)
    blocks = min(blocks, tiles.count)
    k_tiles, stages, workers = inner // INNER, config.stages, config.warpgroups
    worker_rows = config.rows // workers

    def product(x_g, weight_g, out_g, x_s, weight_s, out_s, ready, free):
        block, worker = lax.axis_index("block"), lax.axis_index("worker")
        mine = lax.div(tiles.count - block + (blocks - 1), blocks)  # tiles of this block
        total = mine * k_tiles  # turns of the ring, over all its tiles

        def copy():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

            @pl.loop(0, total)
            def _(turn):
                slot = lax.rem(turn, stages)
                pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                row, column = tiles.start(block + lax.div(turn, k_tiles) * blocks)
                k = pl.ds(lax.rem(turn, k_tiles) * INNER, INNER)
                x_rows = pl.ds(row, tiles.copied_rows)
                plgpu.copy_gmem_to_smem(x_g.at[x_rows, k], x_s.at[slot, pl.ds(0, tiles.copied_rows)], ready.at[slot])
                weight_columns = pl.ds(column, config.columns)
                plgpu.copy_gmem_to_smem(weight_g.at[k, weight_columns], weight_s.at[slot], ready.at[slot])

        def multiply():
            plgpu.set_max_registers(_compute_registers(workers), action="increase")

            @pl.loop(0, mine)
            def _(number):
                first = number * k_tiles

                def operands(k):
                    slot = lax.rem(first + k, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    return x_s.at[slot, pl.ds(worker * worker_rows, worker_rows)], weight_s.at[slot]

                def release(k):
                    turn = first + k
                    pl.when(turn + stages < total)(lambda: plgpu.barrier_arrive(free.at[lax.rem(turn, stages)]))

                shape = worker_rows, config.columns
                acc = _accumulate(shape, k_tiles, operands, release, interpret)
                tiles.store(acc, block + number * blocks, worker, out_s, out_g)

            plgpu.wait_smem_to_gmem(0)

        pl.when(worker < workers)(multiply)
        pl.when(worker == workers)(copy)

    return plgpu.kernel(
        product,
        out_type=jax.ShapeDtypeStruct((rows, columns), out_dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="worker",
        scratch_types={
            "x_s": plgpu.SMEM((stages, config.rows, INNER), x.dtype, transforms=swizzled(x.dtype)),
            "weight_s": plgpu.SMEM((stages, INNER, config.columns), x.dtype, transforms=swizzled(x.dtype)),
            "out_s": plgpu.SMEM((workers, _PIECE, _PIECE), out_dtype, transforms=swizzled(out_dtype)),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret,
    )(x, weight)


def _compute_registers(workers: int) -> int:
    """Per thread. More than the SM has left (512 per thread of a warpgroup) would be waited for without end."""
    return min(240, (512 - _COPY_REGISTERS) // workers // 8 * 8)


def _accumulate(shape, k_tiles: int, operands, release, interpret):
    """The sum over K of x tile @ weight tile, from 0 on, in float32.

    The interpreter's race detector looks at loads, not at what `wgmma` reads, so there the tiles are loaded and
    multiplied; loads, unlike `wgmma`, must be fenced off from the copy that overwrites what they read.
    """
    if interpret is not None:

        def add(k, acc):
            x, weight = (tile[...].astype(jnp.float32) for tile in operands(k))
            plgpu.commit_smem()
            release(k)
            return acc + lax.optimization_barrier(x @ weight)

        return lax.fori_loop(0, k_tiles, add, jnp.zeros(shape, jnp.float32))

    def multiply(acc):
        @pl.loop(0, k_tiles)
        def _(k):
            plgpu.wgmma(acc, *operands(k))
            plgpu.wgmma_wait(1)  # the products of the turn before have read their tiles
            pl.when(k > 0)(lambda: release(k - 1))

        plgpu.wgmma_wait(0)
        release(k_tiles - 1)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


class _Tiles:
    """How a result [rows, columns] is cut. Tiles are numbered down the rows first: neighbours share weights."""

    def __init__(self, rows: int, columns: int, config: TileConfig):
        self.config = config
        self.rows, self.columns = rows, columns
        self.down, self.across = -(-rows // config.rows), -(-columns // config.columns)
        self.count = self.down * self.across
        self.copied_rows = min(rows, config.rows)
        # What the last tile of each direction shares with its neighbour.
        self.shared_rows = max(self.down * config.rows - rows, 0) if self.down > 1 else 0
        self.shared_columns = self.across * config.columns - columns

    def _index(self, tile):
        return lax.rem(tile, self.down), lax.div(tile, self.down)

    def start(self, tile):
        """The first row and column of a tile."""
        down, across = self._index(tile)
        row, column = down * self.config.rows, across * self.config.columns
        if self.shared_rows:
            row = jnp.minimum(row, self.rows - self.config.rows)
        if self.shared_columns:
            column = jnp.minimum(column, self.columns - self.config.columns)
        return pl.multiple_of(row, ROW_MULTIPLE), pl.multiple_of(column, _PIECE)

    def store(self, acc, tile, worker, out_s, out_g) -> None:
        """Send a warpgroup's part of a tile out, 64 x 64 at a time."""
        row, column = self.start(tile)
        down, across = self._index(tile)
        worker_rows, columns = acc.shape
        for i in range(worker_rows // _PIECE):
            local = worker * worker_rows + i * _PIECE  # the piece's first row within the tile
            for j in range(columns // _PIECE):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                piece = acc[i * _PIECE : (i + 1) * _PIECE, j * _PIECE : (j + 1) * _PIECE]
                out_s[worker] = piece.astype(out_s.dtype)
                plgpu.commit_smem()

                def send(first, count, local=local, j=j):
                    rows = pl.ds(pl.multiple_of(row + local + first, ROW_MULTIPLE), count)
                    target = out_g.at[rows, pl.ds(pl.multiple_of(column + j * _PIECE, _PIECE), _PIECE)]
                    plgpu.copy_smem_to_gmem(out_s.at[worker, pl.ds(first, count)], target)

                new = True
                if self.shared_columns >= (j + 1) * _PIECE:
                    new = across < self.across - 1
                self._send_rows(send, local, down, new)

    def _send_rows(self, send, local, down, new) -> None:
        """Store a piece's rows: all of them, those that exist, or those that no other tile stores."""
        when = lambda condition, action: pl.when(condition if new is True else condition & new)(action)
        if self.down == 1 and self.rows < self.config.rows:
            whole, rest = self.rows // _PIECE * _PIECE, self.rows % _PIECE
            when(local < whole, lambda: send(0, _PIECE))
            if rest:
                when(local == whole, lambda: send(0, rest))
        elif self.shared_rows:
            last, partly = down == self.down - 1, self.shared_rows // _PIECE * _PIECE
            skipped = self.shared_rows % _PIECE
            when(~last | (local >= partly + (_PIECE if skipped else 0)), lambda: send(0, _PIECE))
            if skipped:
                when(last & (local == partly), lambda: send(skipped, _PIECE - skipped))
        elif new is True:
            send(0, _PIECE)
        else:
            pl.when(new)(lambda: send(0, _PIECE))
