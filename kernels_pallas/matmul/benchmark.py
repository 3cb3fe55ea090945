"""What a product costs, by shape, and how long it takes: `python -m jaxserve.kernels_pallas.matmul.benchmark`

Bytes and operations follow from the shape; the floor is the longer of the two on an H200, by its data sheet. On a
Hopper GPU each shape is timed, ours and what XLA is free to choose, over weights of several times the cache; elsewhere
only the floors are printed.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels_pallas.capability import why_no_hopper
from jaxserve.kernels_pallas.matmul.mosaic import matmul
from jaxserve.kernels_pallas.matmul.reference import matmul_reference
from jaxserve.kernels_pallas.roofline import matmul_cost

# Llama-3-8B's: qkv, out, gate and up, down, head.
SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256))
COLD_BYTES = 200 * 2**20  # read between two uses of a weight, so that the cache (50 MB) does not hold it any more


def seconds(
    product: Callable, rows: int, inner: int, columns: int, *, repeats: int, cold_bytes: int = COLD_BYTES
) -> float:
    """Of one product x @ weight among others; the best of three rounds."""
    copies = cold_bytes // (2 * inner * columns) + 1
    normal = jax.jit(lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), static_argnums=1)
    x, weights = normal(0, (rows, inner)), [normal(1 + i, (inner, columns)) for i in range(copies)]
    call = jax.jit(partial(_each_weight, product))
    jax.block_until_ready(call(x, weights))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(repeats):
            result = call(x, weights)
        jax.block_until_ready(result)
        best = min(best, time.perf_counter() - started)
    return best / repeats / copies


def _each_weight(product: Callable, x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    """The products of x with each weight, one after the other."""
    total = jnp.float32(0)
    for weight in weights:
        x, out = lax.optimization_barrier((x, product(x, weight)))  # the next product waits for this one
        total += out[0, 0].astype(jnp.float32)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=[8, 64, 128, 256, 2048])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    products = {"mosaic": matmul, "xla": matmul_reference} if why_no_hopper(jax.local_devices()[0]) is None else {}
    print(
        f"{'rows':>6} {'in':>6} {'out':>7} {'MB':>8} {'GFLOP':>9} {'floor us':>9}"
        + "".join(f"{n:>9}" for n in products)
    )
    for inner, columns in SHAPES:
        for rows in options.rows:
            cost = matmul_cost(rows, inner, columns)
            line = f"{rows:>6} {inner:>6} {columns:>7} {cost.bytes / 1e6:8.1f} {cost.operations / 1e9:9.1f}"
            times = [seconds(product, rows, inner, columns, repeats=options.repeats) for product in products.values()]
            print(f"{line} {cost.floor * 1e6:9.1f}" + "".join(f"{1e6 * took:9.1f}" for took in times), flush=True)


if __name__ == "__main__":
    main()
