"""What the kernels for Hopper (compute capability 9.0) share. They are written with `plgpu.kernel`, Mosaic GPU.

A kernel here takes `interpret`: None compiles it for the GPU, `interpreted()` runs it on the CPU, warpgroups, bulk
copies and barriers included, and finds races. The interpreter lacks WGMMA with an operand in registers or a preset
accumulator, and its race detector does not look at WGMMA operands; so the two products are here, each with what is
interpreted instead.
"""

from collections.abc import Callable

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

ROWS = 64  # the M of one WGMMA: rows of a query tile
SMS = 132  # multiprocessors of an H100 or H200 (SXM)
SMEM_PER_SM = 233_472  # bytes of shared memory; each program also takes SMEM_RESERVED of them
SMEM_RESERVED = 1024
MAX_SMEM = 232_448  # bytes of one program

Interpret = plgpu.InterpretGPUParams | None


def interpreted(*, detect_races: bool = True) -> plgpu.InterpretGPUParams:
    """The `interpret` of a kernel that runs on the CPU. JAX prints the races that it finds."""
    return plgpu.InterpretGPUParams(detect_races=detect_races)


def swizzled(dtype: jnp.dtype) -> tuple:
    """The transforms of an SMEM tile that bulk copies fill and WGMMA reads: 128-byte swizzle in units of 8 rows."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def row_vector(value: float) -> Float32[Array, "64"]:
    """One number for each row of a tile, laid out like a row reduction of a WGMMA result."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def row_index() -> Int[Array, "64"]:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))


def column_index(columns: int) -> Int[Array, "64 columns"]:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), 1, layout=plgpu.Layout.WGMMA)


def zeros(columns: int) -> Float32[Array, "64 columns"]:
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)


def over_columns(rows: Array, columns: int) -> Array:
    """A row vector repeated in every column."""
    return lax.broadcast_in_dim(rows, (ROWS, columns), [0])


def product_transposed(a_s, b_s, *, interpret: Interpret) -> Float32[Array, "64 n"]:
    """a [64, k] times b [n, k] transposed, both in SMEM, in float32."""
    if interpret is not None:
        return _plain_product(a_s[...], b_s[...].T)

    def multiply(acc):
        plgpu.wgmma(acc, a_s, b_s.T)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, b_s.shape[0]), jnp.float32))


def accumulate_product(
    acc: Float32[Array, "64 n"], a: Float[Array, "64 k"], b_s, *, interpret: Interpret
) -> Float32[Array, "64 n"]:
    """acc + a @ b in float32: a in registers, b [k, n] in SMEM."""
    if interpret is not None:
        return lax.optimization_barrier(acc) + _plain_product(a, b_s[...])
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b_s))(plgpu.ACC.init(acc))


def _plain_product(a, b):
    """What the interpreter computes instead of a WGMMA: a product of loaded values, which its race detector sees.

    Loads, unlike WGMMA, must be fenced off from the bulk copy that overwrites what they read. The barrier keeps
    XLA from fusing the product with its neighbours, which would change its bits from one kernel to the next.
    """
    plgpu.commit_smem()
    return lax.optimization_barrier(a.astype(jnp.float32) @ b.astype(jnp.float32))


def work_loop(total: Int[Array, ""], programs: int, body: Callable, carry=None):
    """`body(index[, carry])` for every `programs`-th piece of work from this program's own number on.

    A grid has a fixed size and a program that finds nothing to do costs a launch; so grids are as large as the
    GPU holds at once, and the number of pieces of work is known on the device alone. The grid's axis is "program".
    """
    first = lax.axis_index("program")
    turns = lax.div(total - first + (programs - 1), jnp.int32(programs))
    if carry is None:
        return lax.fori_loop(jnp.int32(0), turns, lambda turn, _: body(first + turn * programs), None)
    return lax.fori_loop(jnp.int32(0), turns, lambda turn, carry: body(first + turn * programs, carry), carry)


def next_slot(slot: Int[Array, ""], slots: int) -> Int[Array, ""]:
    """The slot of a ring that follows; a remainder would take more registers."""
    return jnp.where(slot == slots - 1, 0, slot + 1)
